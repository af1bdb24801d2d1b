"""How an option is declared, once: its name, type, range, help and default are a dataclass field.

The command line, `--config FILE`, Python's keywords, the HTTP body and the pages are views of these
fields; `check` is the one check of a value. The names that options take stand here as plain text,
so that `--help` loads neither torch nor transformers. Tests hold them equal to the registries.
"""

import difflib
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from importlib.metadata import entry_points
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from treespec.errors import InputError
from treespec.trees.policy import EXAMPLES
from treespec.trees.ranges import Range

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MANY = 10**9  # more steps, questions or positions than anybody has
TOKENS = 10**6  # tokens of a text
SEEDS = 2**63 - 1  # torch takes seeds below 2^64; later answers add to the first one's

TREE_FORMS = EXAMPLES
TREE_FILE = "a JSON file of paths"

# Forms that a target is quantised to at loading: bitsandbytes' two, then torchao's.
LOAD_IN = ("4bit", "8bit", "fp8", "int8")
LOAD_IN_FORMS = (*LOAD_IN, "gguf:FILE")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
# accelerate's placements, torch's devices and their numbers
PLACES = (
    r"auto|balanced|balanced_low_0|sequential|(cpu|cuda|mps|xpu|npu|hpu|mlu|musa|meta)(:\d+)?|\d+"
)
QUESTIONS = ("builtin", "mt-bench", "spec-bench", "humaneval", "gsm8k")


def either(names: Iterable[str]) -> str:
    """`a, b or c`."""
    *before, last = names
    return f"{', '.join(before)} or {last}" if before else last


def option(
    help: str,
    default: object = MISSING,
    *,
    words: Iterable[str] = (),
    choices: Iterable[str] = (),
    line: object = "",
    **ends: Any,
) -> Any:
    """A dataclass field with its option's help. Without a default the option is required.

    ends: least, most, above, below: the range of a number (`Range`). Every int and float has one
    with two ends. For a str field it is the range of each number in a list, whole: of whole ones.
    words: names that the list may hold beside numbers. choices: the names that a str field may hold.
    line: how the command line gives it: (type, function from its words to the value); "": as it is;
    None: not at all.
    """
    told = {"help": help, "words": tuple(words), "choices": tuple(choices), "line": line}
    return field(default=default, metadata=told | {"range": Range(**ends) if ends else None})


def shared(group: type["DataclassInstance"], name: str, *default: object) -> Any:
    """An option of another dataclass, with its default or another one."""
    (known,) = (known for known in fields(group) if known.name == name)
    return field(default=default[0] if default else known.default, metadata=known.metadata)


def range_of(known: Field) -> Range | None:
    """The range of a field that `option` made."""
    allowed: Range | None = known.metadata["range"]
    return allowed and replace(allowed, whole=allowed.whole or known.type in (int, int | None))


@dataclass(frozen=True)
class Options:
    """Options that are checked as they are made; a subclass has a field for each. Raises InputError.

    FLAG: what an option's name begins with in a message. PANEL: the heading in `--help` of the
    options that a group declares.
    """

    FLAG: ClassVar[str] = ""
    PANEL: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        check(self, self.FLAG)

    @classmethod
    def named(cls, name: str) -> str:
        """An option as a message names it: --top-p on the command line, top_p in Python."""
        return called(name, cls.FLAG)


@dataclass(frozen=True)
class CommandOptions(Options):
    """Options of a command."""

    FLAG = "--"


def called(name: str, flag: str) -> str:
    return flag + name.replace("_", "-") if flag else name


def check(options: "DataclassInstance", flag: str = "--") -> None:
    """Raises InputError for the first value that is not of its option's type, range or choices.

    NaN and infinities lie in no range. Numbers of NumPy become Python's. flag: as `Options.FLAG`.
    """
    for known in fields(options):
        value = getattr(options, known.name)
        kinds = get_args(known.type) or (known.type,)
        name = called(known.name, flag)
        told = known.metadata
        if value is None and (known.default is None or type(None) in kinds):
            continue
        empty = "" in value if isinstance(value, list | tuple) else value == ""
        if flag and empty and value != known.default:
            raise InputError(f"{name} is empty: give a value, or leave the option out")
        choices = told["choices"]
        if choices and value not in choices:
            hint = nearest(value, choices)
            raise InputError(f"{name} is {value!r}, must be {either(choices)}{hint}")
        allowed = range_of(known)
        if allowed:
            value = plain(value)
            listed = isinstance(value, str) and str in kinds
            for number in numbers_in(name, value, allowed, told["words"]) if listed else [value]:
                if number not in allowed:
                    raise InputError(f"{name} is {number!r:.40}, must be {allowed}")
            object.__setattr__(options, known.name, float(value) if known.type is float else value)
        elif known.type is bool and not type(value).__name__.startswith("bool"):  # NumPy's, too
            raise InputError(f"{name} is {value!r:.40}, must be True or False")
        elif not flag and {*kinds} <= {str, type(None)} and not isinstance(value, kinds):
            raise InputError(f"{name} is {value!r:.40}, must be a string")


def plain(value: Any) -> Any:
    """A number of any library as Python's; anything else as it is."""
    if isinstance(value, bool | int | float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def whole(name: str, value: object, least: int | None = None) -> int:
    """Raises InputError for anything but a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} is {value!r:.40}, must be a whole number")
    if least is not None and value < least:
        raise InputError(f"{name} is {value}, must be at least {least}")
    return int(value)


def chosen(options: "DataclassInstance", group: type["DataclassInstance"]) -> dict[str, Any]:
    """The options of a group that differ from the group's own defaults, as keywords."""
    values = {known: getattr(options, known.name) for known in fields(group)}
    return {known.name: value for known, value in values.items() if value != known.default}


def refuse(complaints: Mapping[str, object]) -> None:
    """Raises InputError with the first complaint that holds."""
    for complaint, holds in complaints.items():
        if holds:
            raise InputError(complaint)


def check_place(device_map: str | None) -> None:
    """Raises InputError for a `--device-map` that accelerate has not."""
    if device_map is not None and not re.fullmatch(PLACES, device_map):
        raise InputError(
            f"--device-map is {device_map!r}, must be auto, balanced, sequential, or a device such "
            "as cpu or cuda:0"
        )


def numbers_in(name: str, text: str, allowed: Range, words: Collection[str]) -> list[float]:
    """The numbers in a list such as `0,0.6` or `8;16`.

    words: parts to skip. Raises InputError for a part that is neither.
    """
    numbers = []
    for part in map(str.strip, re.split("[,;]", text)):
        try:
            if part not in words:
                numbers.append(int(part) if allowed.whole else float(part))
        except ValueError:
            raise InputError(f"{name}: {part!r} is not {allowed}") from None
    return numbers


def command_line(
    name: str, options: type["DataclassInstance"], config: Mapping[str, object]
) -> str:
    """The line of the command `name` with these options, without those that have their defaults."""
    words = ["treespec", name]
    for known in fields(options):
        value = config.get(known.name)
        flag = called(known.name, "--")
        if value is None or value == known.default:
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, str(value)]
    return shlex.join(words)


def nearest(name: str, names: Iterable[str]) -> str:
    """` (did you mean rrs-wo?)`, or "" where none of the names is similar."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def installed(table: str) -> dict[str, Any]:
    """The entries that installed packages add to a table, by name.

    table: `drafters` or `verifiers`. A package names an entry as an entry point:

        [project.entry-points."treespec.drafters"]
        echo = "my_package:ECHO"
    """
    return {point.name: point.load() for point in entry_points(group=f"treespec.{table}")}
