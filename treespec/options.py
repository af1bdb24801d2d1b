"""Declare each option once, as a dataclass field: its name, type, range, help text and default.

The command line, `--config FILE`, Python's keywords, HTTP bodies and the pages all read these fields, and
`check_options` checks every value. The names that options accept are plain strings here, so that `--help` loads neither
torch nor transformers; tests compare them with the registries.
"""

import dataclasses
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from numbers import Integral, Real
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from treespec.errors import InputError, find_similar_name
from treespec.trees.policy import TREE_EXAMPLES
from treespec.trees.ranges import Range

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_COUNT = 10**9  # of steps, questions or positions; an end of a range that is not shown
MAX_TEXT_TOKENS = 10**6  # of one text
MAX_SEED = 2**63 - 1  # torch accepts seeds below 2^64; further answers add to the first seed

TREE_FORMS = TREE_EXAMPLES
TREE_FILE = "a JSON file of paths"

# Values of --load-in, which quantise a target as it loads: two by bitsandbytes, two by torchao, two by treespec.
ROUNDED_HERE = ("q8", "q4")  # treespec's own
LOAD_IN = ("4bit", "8bit", "fp8", "int8", *ROUNDED_HERE)
LOAD_IN_FORMS = LOAD_IN + ("gguf:FILE",)
DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16", "float64")
# other tools' names of precisions -> torch's
DTYPE_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "f16": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}
# values of --device-map: accelerate's placements, torch's devices, device numbers
DEVICE_MAPS = (
    r"auto|balanced|balanced_low_0|sequential|(cpu|cuda|mps|xpu|npu|hpu|mlu|musa|meta)(:\d+)?|\d+"
)
QUESTION_SUITES = (
    "builtin",
    "mt-bench",
    "spec-bench",
    "humaneval",
    "gsm8k",
    "speed-bench",
    "speed-bench-1k",
    "speed-bench-2k",
    "speed-bench-8k",
    "speed-bench-16k",
    "speed-bench-32k",
)


def join_or(names: Iterable[str]) -> str:
    """Join names as in `a, b or c`."""
    items = list(names)
    if len(items) == 1:
        return items[0]
    return f"{', '.join(items[:-1])} or {items[-1]}"


def option(
    help: str,
    default: object = MISSING,
    *,
    words: Iterable[str] = (),
    choices: Iterable[str] = (),
    aliases: Mapping[str, str] | None = None,
    line: object = "",
    **ends: Any,
) -> Any:
    """Declare an option as a dataclass field.

    Args:
        help: the option's help text in `--help` and on the pages.
        default: default value. Without one the option is required.
        words: words that a list of numbers may hold in addition to numbers. Default: ().
        choices: values that a str field may have. Default: (), any.
        aliases: {other name of a choice: the choice}, such as those of other tools. Default: None, no other names.
        line: how the command line reads the option: (type, function from its words to the value). Default: "", by
            the field's type. None: the option is for Python and HTTP only.
        ends: `least`, `most`, `above`, `below`: the range of a number (`Range`). Every int and float option needs a
            lower and an upper end. For a str field it is the range of each number in a list, and `whole=True` allows
            only whole numbers.
    """
    allowed = None
    if ends:
        allowed = Range(**ends)
    metadata = {
        "help": help,
        "words": tuple(words),
        "choices": tuple(choices),
        "aliases": aliases or {},
        "line": line,
        "range": allowed,
    }
    return dataclasses.field(default=default, metadata=metadata)


def reuse_option(group: type["DataclassInstance"], name: str, default: object = MISSING) -> Any:
    """Declare an option of the dataclass `group` again, with the same default or another one."""
    declared = group.__dataclass_fields__[name]
    if default is MISSING:
        default = declared.default
    return dataclasses.field(default=default, metadata=declared.metadata)


def get_range(field: Field) -> Range | None:
    """The range of a field that `option` declared; an int field allows only whole numbers. None: no range."""
    allowed: Range | None = field.metadata["range"]
    if allowed is not None and field.type in (int, int | None):
        return replace(allowed, whole=True)
    return allowed


@dataclass(frozen=True)
class Options:
    """Base class of option groups: a subclass declares a field per option, and its values are checked on creation.

    Attributes:
        FLAG: prefix of an option's name in messages, such as "--".
        PANEL: heading in `--help` of the options that the class declares.

    Raises: InputError for an invalid value.
    """

    FLAG: ClassVar[str] = ""
    PANEL: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        check_options(self, self.FLAG)

    @classmethod
    def format_option_name(cls, name: str) -> str:
        """Format an option's name for a message: --top-p on the command line, top_p in Python."""
        return format_flag(name, cls.FLAG)


@dataclass(frozen=True)
class CommandOptions(Options):
    """Options of a command."""

    FLAG = "--"


def format_flag(name: str, flag: str) -> str:
    """Format an option's name for a message. flag: as `Options.FLAG`."""
    if flag:
        return flag + name.replace("_", "-")
    return name


def check_options(options: "DataclassInstance", flag: str = "--") -> None:
    """Check all values, and convert numbers of other libraries, such as NumPy's, to Python's.

    NaN and infinities are outside every range.

    Args:
        options: a dataclass whose fields `option` declared; converted values are stored in it.
        flag: as `Options.FLAG`. Default: --.

    Raises: InputError for the first value with a wrong type, range or choice.
    """
    for field in fields(options):
        value = getattr(options, field.name)
        if value is None and NoneType in list_types(field):
            continue
        if isinstance(value, str):
            value = field.metadata["aliases"].get(value, value)
        name = format_flag(field.name, flag)
        check_choice(name, value, field, flag)
        object.__setattr__(options, field.name, check_type(name, value, field, flag))


def list_types(field: Field) -> tuple[Any, ...]:
    """The types that an option's value may have, with NoneType if the default is None."""
    types = get_args(field.type) or (field.type,)
    if field.default is None:
        types += (NoneType,)
    return types


def check_choice(name: str, value: object, field: Field, flag: str) -> None:
    """Raises InputError for an empty value on the command line, and for a value that is none of the choices."""
    if flag and is_empty(value) and value != field.default:
        raise InputError(f"{name} is empty: give a value, or leave the option out")
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise InputError(explain_choice(name, value, choices))


def explain_choice(name: str, value: object, choices: Collection[str]) -> str:
    """Explain that an option's value is none of the choices, with the most similar one."""
    hint = find_nearest_name(str(value), choices)
    return f"{name} is {value!r}, must be {join_or(choices)}{hint}"


def check_type(name: str, value: Any, field: Field, flag: str) -> Any:
    """Check an option's value against its type and range, and return it, a number as Python's own type.

    Raises: InputError for a value of another type, or outside of the range.
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
    elif field.type in (bool, bool | None):
        check_boolean(name, value)
    # Values of the command line are strings already.
    elif not flag and set(types) <= {str, NoneType} and not isinstance(value, str):
        raise InputError(f"{name} is {value!r:.40}, must be a string")
    return value


def is_empty(value: object) -> bool:
    """Whether a value is an empty string, or a list with one."""
    if isinstance(value, list | tuple):
        return "" in value
    return value == ""


def check_number(name: str, number: object, allowed: Range) -> None:
    """Raises InputError for a number outside of its option's range."""
    if number not in allowed:
        raise InputError(f"{name} is {number!r:.40}, must be {allowed.describe(number)}")


def check_boolean(name: str, value: object) -> None:
    """Raises InputError for anything but True and False, of Python or of NumPy."""
    if not type(value).__name__.startswith("bool"):
        raise InputError(f"{name} is {value!r:.40}, must be True or False")


def to_python_number(value: Any) -> Any:
    """Convert a number of any library to Python's int or float; other values are returned as they are."""
    if isinstance(value, bool | int | float) or not isinstance(value, Real):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value)


def require_whole_number(name: str, value: object, least: int | None = None) -> int:
    """Convert a value to int. Raises InputError for anything but a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} is {value!r:.40}, must be a whole number")
    if least is not None and value < least:
        raise InputError(f"{name} is {value}, must be at least {least}")
    return int(value)


def list_changed_options(
    options: "DataclassInstance", group: type["DataclassInstance"]
) -> dict[str, Any]:
    """The options of a group whose values differ from the group's defaults, as keywords."""
    keywords = {}
    for field in fields(group):
        value = getattr(options, field.name)
        if value != field.default:
            keywords[field.name] = value
    return keywords


def raise_first(complaints: Mapping[str, object]) -> None:
    """Raises InputError with the first message whose condition is true. complaints: message -> condition."""
    for complaint, holds in complaints.items():
        if holds:
            raise InputError(complaint)


def check_place(device_map: str | None) -> None:
    """Raises InputError for a `--device-map` that accelerate does not know."""
    if device_map is not None and not re.fullmatch(DEVICE_MAPS, device_map):
        raise InputError(
            f"--device-map is {device_map!r}, must be auto, balanced, sequential, or a device such "
            "as cpu or cuda:0"
        )


def parse_numbers(name: str, text: str, allowed: Range, words: Collection[str]) -> list[float]:
    """Parse the numbers in a list such as `0,0.6` or `8;16`.

    Args:
        name: the option's name, for errors.
        text: the list.
        allowed: its `whole` says whether the numbers must be whole; their range is not checked here.
        words: words that the list may hold, which are skipped.

    Raises: InputError for a part that is neither a number nor one of the words.
    """
    number_type: type[float] = float
    if allowed.whole:
        number_type = int
    numbers = []
    for part in re.split("[,;]", text):
        part = part.strip()
        if part in words:
            continue
        try:
            numbers.append(number_type(part))
        except ValueError:
            raise InputError(f"{name}: {part!r} is not {allowed}") from None
    return numbers


def format_command_line(
    name: str, options: type["DataclassInstance"], config: Mapping[str, object]
) -> str:
    """Format the command line that runs `name` with these options; options with default values are left out."""
    words = ["treespec", name]
    for field in fields(options):
        value = config.get(field.name)
        flag = format_flag(field.name, "--")
        is_on_the_line = field.metadata.get("line", ()) is not None
        if value in (None, [], field.default) or not is_on_the_line:
            continue
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(f"--no-{flag[2:]}")
        else:
            words += [flag, str(value)]
    return shlex.join(words)


def find_nearest_name(name: str, names: Iterable[str]) -> str:
    """Suggest the most similar name, as in ` (did you mean rrs-wo?)`; "" if no name is similar."""
    similar_name = find_similar_name(name, names)
    if similar_name is None:
        return ""
    return f" (did you mean {similar_name}?)"
