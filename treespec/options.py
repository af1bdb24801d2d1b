"""Options of commands: the names that they take, and dataclass fields that become them.

The names stand here as plain text, so that `--help` loads neither torch nor transformers. Tests
hold them equal to the registries.
"""

import difflib
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, Field, field, fields
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

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
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    whole: bool = False,
    words: Iterable[str] = (),
    choices: Iterable[str] = (),
) -> Any:
    """A dataclass field with its option's help. Without a default the option is required.

    least, most, above, below: the range of a number, for `check_ranges`. Every int and float has
    one with two ends. For a str field it is the range of each number in a list.
    whole: the list holds whole numbers.
    words: names that the list may hold beside numbers.
    choices: the names that a str field may hold, for `check_choices`.
    """
    metadata: dict[str, object] = {"help": help, "whole": whole, "words": tuple(words)}
    metadata["choices"] = tuple(choices)
    if (least, most, above, below) != (None,) * 4:
        metadata["range"] = (least, most, above, below)
    return field(default=default, metadata=metadata)


def shared(group: type["DataclassInstance"], name: str, default: object = MISSING) -> Any:
    """An option of another dataclass with another default; without a default it is required."""
    (known,) = (known for known in fields(group) if known.name == name)
    return field(default=default, metadata=known.metadata)


def range_of(known: Field) -> Range | None:
    """The range of a field that `option` made."""
    if "range" not in known.metadata:
        return None
    least, most, above, below = known.metadata["range"]
    whole = known.metadata["whole"] or known.type in (int, int | None)
    return Range(least, most, above, below, whole)


def check_ranges(config: "DataclassInstance", flag: str = "--") -> None:
    """Raises InputError for the first number outside its option's range, NaN and infinities too.

    flag: prefix of the name in the message. It is "" for options inside an option, as in
    lookup:tokens=10.
    """
    for known in fields(config):
        allowed, value = range_of(known), getattr(config, known.name)
        if allowed is None or value is None:
            continue
        name = flag + known.name.replace("_", "-")
        if isinstance(value, str):
            values = numbers_in(name, value, allowed, known.metadata["words"])
        else:
            values = list(value) if isinstance(value, tuple) else [value]
        for number in values:
            if number not in allowed:
                raise InputError(f"{name} is {number}, must be {allowed}")


def check_filled(config: "DataclassInstance") -> None:
    """Raises InputError for the first option that is an empty text, or a list that holds one."""
    for known in fields(config):
        value = getattr(config, known.name)
        if value == "" or (isinstance(value, list) and "" in value):
            name = known.name.replace("_", "-")
            raise InputError(f"--{name} is empty: give a value, or leave the option out")


def check_choices(config: "DataclassInstance") -> None:
    """Raises InputError for the first name that is none of its option's choices."""
    for known in fields(config):
        choices, value = known.metadata.get("choices"), getattr(config, known.name)
        if choices and value is not None and value not in choices:
            name = known.name.replace("_", "-")
            raise InputError(
                f"--{name} is {value!r}, must be {either(choices)}{nearest(value, choices)}"
            )


def check_place(device_map: str | None) -> None:
    """Raises InputError for a `--device-map` that accelerate has not."""
    if device_map is not None and not re.fullmatch(PLACES, device_map):
        raise InputError(
            f"--device-map is {device_map!r}, must be auto, balanced, sequential, or a device such "
            "as cpu or cuda:0"
        )


def numbers_in(name: str, text: str, allowed: Range, words: Collection[str]) -> list[float]:
    """The numbers in a list such as `0,0.6`, `1,1.2/2` or `8;16`.

    words: parts to skip. Raises InputError for a part that is neither.
    """
    parts = [part.strip() for part in re.split(r"[,;/]", text)]
    if not all(parts):
        raise InputError(f"{name} {text!r} has an empty part: separate by single commas")
    numbers = []
    for part in parts:
        if part in words:
            continue
        try:
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
        default = None if known.default is MISSING else known.default
        if value is None or value == default:
            continue
        flag = "--" + known.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, f"{value:.12g}" if isinstance(value, float) else str(value)]
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
