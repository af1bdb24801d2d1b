"""How an option is declared, once: its name, type, range, help and default are a dataclass field.

The command line, `--config FILE`, Python's keywords, the HTTP body and the pages are views of these
fields; `check_options` is the one check of a value. The names that options take stand here as plain text,
so that `--help` loads neither torch nor transformers. Tests hold them equal to the registries.
"""

import dataclasses
import difflib
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from importlib.metadata import entry_points
from numbers import Integral, Real
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from treespec.errors import InputError
from treespec.trees.policy import TREE_EXAMPLES
from treespec.trees.ranges import Range

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_COUNT = 10**9  # more steps, questions or positions than anybody has
MAX_TEXT_TOKENS = 10**6  # tokens of a text
MAX_SEED = 2**63 - 1  # torch takes seeds below 2^64; later answers add to the first one's

TREE_FORMS = TREE_EXAMPLES
TREE_FILE = "a JSON file of paths"

# Forms that a target is quantised to at loading: bitsandbytes' two, then torchao's.
LOAD_IN = ("4bit", "8bit", "fp8", "int8")
LOAD_IN_FORMS = LOAD_IN + ("gguf:FILE",)
DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16", "float64")
# accelerate's placements, torch's devices and their numbers
DEVICE_MAPS = (
    r"auto|balanced|balanced_low_0|sequential|(cpu|cuda|mps|xpu|npu|hpu|mlu|musa|meta)(:\d+)?|\d+"
)
QUESTION_SUITES = ("builtin", "mt-bench", "spec-bench", "humaneval", "gsm8k")


def join_or(names: Iterable[str]) -> str:
    """`a, b or c`."""
    listed = list(names)
    if len(listed) == 1:
        return listed[0]
    return f"{', '.join(listed[:-1])} or {listed[-1]}"


def option(
    help: str,
    default: object = MISSING,
    *,
    words: Iterable[str] = (),
    choices: Iterable[str] = (),
    line: object = "",
    **ends: Any,
) -> Any:
    """Declare an option as a dataclass field. Without a default the option is required.

    Args:
        help: the option's line in `--help` and on the pages.
        words: names that a list of numbers may hold beside the numbers.
        choices: the names that a str field may hold; () allows any.
        line: how the command line reads the option: (type, function from its words to the value).
            "" reads the field's own type; None leaves the option to Python and HTTP.
        ends: `least`, `most`, `above`, `below`: the range of a number (`Range`); every int and float
            has two ends. For a str field it is the range of each number in a list, and
            `whole=True` takes whole numbers only.
    """
    allowed = None
    if ends:
        allowed = Range(**ends)
    metadata = {
        "help": help,
        "words": tuple(words),
        "choices": tuple(choices),
        "line": line,
        "range": allowed,
    }
    return dataclasses.field(default=default, metadata=metadata)


def reuse_option(group: type["DataclassInstance"], name: str, default: object = MISSING) -> Any:
    """Declare an option of another dataclass again, with its default or another one."""
    declared = group.__dataclass_fields__[name]
    if default is MISSING:
        default = declared.default
    return dataclasses.field(default=default, metadata=declared.metadata)


def get_range(field: Field) -> Range | None:
    """The range of a field that `option` made; that of an int field holds whole numbers only."""
    allowed: Range | None = field.metadata["range"]
    if allowed is not None and field.type in (int, int | None):
        return replace(allowed, whole=True)
    return allowed


@dataclass(frozen=True)
class Options:
    """Options that are checked as they are made; a subclass has a field for each. Raises InputError.

    FLAG: what an option's name begins with in a message. PANEL: the heading in `--help` of the
    options that a group declares.
    """

    FLAG: ClassVar[str] = ""
    PANEL: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        check_options(self, self.FLAG)

    @classmethod
    def format_option_name(cls, name: str) -> str:
        """An option as a message names it: --top-p on the command line, top_p in Python."""
        return format_flag(name, cls.FLAG)


@dataclass(frozen=True)
class CommandOptions(Options):
    """Options of a command."""

    FLAG = "--"


def format_flag(name: str, flag: str) -> str:
    """An option as a message names it. flag: as `Options.FLAG`."""
    if flag:
        return flag + name.replace("_", "-")
    return name


def check_options(options: "DataclassInstance", flag: str = "--") -> None:
    """Replace numbers of other libraries, such as NumPy's, by Python's, and check all values.

    Raises InputError for the first value that is not of its option's type, range or choices. NaN and
    infinities lie in no range. flag: as `Options.FLAG`.
    """
    for field in fields(options):
        value = getattr(options, field.name)
        if value is None and NoneType in list_types(field):
            continue
        name = format_flag(field.name, flag)
        check_choice(name, value, field, flag)
        object.__setattr__(options, field.name, check_type(name, value, field, flag))


def list_types(field: Field) -> tuple[Any, ...]:
    """The types that an option's value may have; NoneType is one of them if None is the default."""
    types = get_args(field.type) or (field.type,)
    if field.default is None:
        types += (NoneType,)
    return types


def check_choice(name: str, value: object, field: Field, flag: str) -> None:
    """Raises InputError for an empty text on the command line, and for a name that is no choice."""
    if flag and is_empty(value) and value != field.default:
        raise InputError(f"{name} is empty: give a value, or leave the option out")
    choices = field.metadata["choices"]
    if choices and value not in choices:
        hint = find_nearest_name(str(value), choices)
        raise InputError(f"{name} is {value!r}, must be {join_or(choices)}{hint}")


def check_type(name: str, value: Any, field: Field, flag: str) -> Any:
    """Return an option's value as it is stored: a number as Python's own.

    Raises InputError for a value of another type or outside of the option's range.
    """
    types = list_types(field)
    allowed = get_range(field)
    if allowed and str in types and isinstance(value, str):
        for number in parse_numbers(name, value, allowed, field.metadata["words"]):
            check_number(name, number, allowed)
    elif allowed:
        value = to_python_number(value)
        check_number(name, value, allowed)
        if field.type is float:
            value = float(value)
    elif field.type is bool:
        check_boolean(name, value)
    # The words of the command line are strings already.
    elif not flag and set(types) <= {str, NoneType} and not isinstance(value, str):
        raise InputError(f"{name} is {value!r:.40}, must be a string")
    return value


def is_empty(value: object) -> bool:
    """Whether the command line gave an empty text, alone or in a list."""
    if isinstance(value, list | tuple):
        return "" in value
    return value == ""


def check_number(name: str, number: object, allowed: Range) -> None:
    """Raises InputError for a number outside of its option's range."""
    if number not in allowed:
        raise InputError(f"{name} is {number!r:.40}, must be {allowed}")


def check_boolean(name: str, value: object) -> None:
    """Raises InputError for anything but True and False, of Python or of NumPy."""
    if not type(value).__name__.startswith("bool"):
        raise InputError(f"{name} is {value!r:.40}, must be True or False")


def to_python_number(value: Any) -> Any:
    """A number of any library as Python's; anything else as it is."""
    if isinstance(value, bool | int | float) or not isinstance(value, Real):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value)


def require_whole_number(name: str, value: object, least: int | None = None) -> int:
    """Raises InputError for anything but a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} is {value!r:.40}, must be a whole number")
    if least is not None and value < least:
        raise InputError(f"{name} is {value}, must be at least {least}")
    return int(value)


def list_changed_options(
    options: "DataclassInstance", group: type["DataclassInstance"]
) -> dict[str, Any]:
    """The options of a group that differ from the group's own defaults, as keywords."""
    keywords = {}
    for field in fields(group):
        value = getattr(options, field.name)
        if value != field.default:
            keywords[field.name] = value
    return keywords


def raise_first(complaints: Mapping[str, object]) -> None:
    """Raises InputError with the first complaint that holds."""
    for complaint, holds in complaints.items():
        if holds:
            raise InputError(complaint)


def check_place(device_map: str | None) -> None:
    """Raises InputError for a `--device-map` that accelerate has not."""
    if device_map is not None and not re.fullmatch(DEVICE_MAPS, device_map):
        raise InputError(
            f"--device-map is {device_map!r}, must be auto, balanced, sequential, or a device such "
            "as cpu or cuda:0"
        )


def parse_numbers(name: str, text: str, allowed: Range, words: Collection[str]) -> list[float]:
    """The numbers in a list such as `0,0.6` or `8;16`.

    words: parts to skip. Raises InputError for a part that is neither.
    """
    read: type[float] = float
    if allowed.whole:
        read = int
    numbers = []
    for part in re.split("[,;]", text):
        part = part.strip()
        if part in words:
            continue
        try:
            numbers.append(read(part))
        except ValueError:
            raise InputError(f"{name}: {part!r} is not {allowed}") from None
    return numbers


def format_command_line(
    name: str, options: type["DataclassInstance"], config: Mapping[str, object]
) -> str:
    """The line of the command `name` with these options, without those that have their defaults."""
    words = ["treespec", name]
    for field in fields(options):
        value = config.get(field.name)
        flag = format_flag(field.name, "--")
        if value is None or value == field.default:
            continue
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(f"--no-{flag[2:]}")
        else:
            words += [flag, str(value)]
    return shlex.join(words)


def find_nearest_name(name: str, names: Iterable[str]) -> str:
    """` (did you mean rrs-wo?)`, or "" where none of the names is similar."""
    close = difflib.get_close_matches(name, list(names), n=1)
    if not close:
        return ""
    return f" (did you mean {close[0]}?)"


def load_installed_entries(table: str) -> dict[str, Any]:
    """The entries that installed packages add to a table, by name.

    table: `drafters` or `verifiers`. A package names an entry as an entry point:

        [project.entry-points."treespec.drafters"]
        echo = "my_package:ECHO"
    """
    return {point.name: point.load() for point in entry_points(group=f"treespec.{table}")}
