"""Configuration dataclasses whose fields are command-line options: said once, saved beside every result."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import MISSING, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from treespec.errors import InputError
from treespec.trees.ranges import Range

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")

MANY = 10**9  # of what nobody has more of: steps, questions, positions
TOKENS = 10**6  # of a text, and of a vocabulary's part
SEEDS = 2**63 - 1  # below 2^64, which torch takes, so that later answers may count on from one


def option(
    help: str,
    default: Any = MISSING,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    whole: bool = False,
    words: Iterable[str] = (),
) -> Any:
    """A dataclass field with the help of its option; without a default the option is required.

    least, most, above, below: the range of a number, which `check_ranges` holds the field to; every int and float has
    one with two ends. Of a str field it is the range of each number of a list, whole for whole numbers, beside which
    the list may hold these words.
    """
    metadata: dict[str, Any] = {"help": help, "whole": whole, "words": tuple(words)}
    if (least, most, above, below) != (None,) * 4:
        metadata["range"] = (least, most, above, below)
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


def range_of(one: Any) -> Range | None:
    """The range of a field that `option` made."""
    if "range" not in one.metadata:
        return None
    least, most, above, below = one.metadata["range"]
    return Range(least, most, above, below, whole=one.metadata["whole"] or one.type in (int, int | None))


def check_ranges(config: Any, flag: str = "--") -> None:
    """Raises InputError for the first number outside of its option's range; NaN and infinities are outside of all.

    flag: what stands before a name, "" for options inside of one, as in lookup:tokens=10.
    """
    for one in fields(config):
        allowed, value = range_of(one), getattr(config, one.name)
        if allowed is None or value is None:
            continue
        name = flag + one.name.replace("_", "-")
        if isinstance(value, str):
            values = numbers_in(name, value, allowed, one.metadata["words"])
        else:
            values = list(value) if isinstance(value, tuple) else [value]
        for number in values:
            if number not in allowed:
                raise InputError(f"{name} is {number}, must be {allowed}")


def numbers_in(name: str, text: str, allowed: Range, words: Iterable[str]) -> list[float]:
    """The numbers of a list such as `0,0.6`, `1,1.2/2` or `8;16`. Raises InputError for a part that is none."""
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


DRAFTER = (
    "what drafts in place of --head: eagle:HEAD (or eagle3, medusa, hydra, hydra++), model:PATH, self:FILE, "
    "sparse:512, lookup, rest:DATASTORE, lookahead or jacobi"
)

HEADS = ("head", "eagle", "eagle3", "medusa", "hydra", "hydra++")  # drafters that are a head's directory
GIVEN = ("lookup", "rest", "lookahead", "jacobi")  # drafters that hand over given tokens
DRAFTERS = (*HEADS, *GIVEN, "model", "self", "sparse")

TRUST = "run Python files that the target's directory or repository brings; read them first"


def one_source(config: Any) -> None:
    """Raises InputError unless one of `head` and `drafter` is given."""
    if (config.head is None) == (config.drafter is None):
        raise InputError(f"give {'--head or --drafter' if config.head is None else 'only one of --head and --drafter'}")


def nearest(name: str, names: Iterable[str]) -> str:
    """` (did you mean rrs-wo?)` behind a name that is none, where one of the names is like it; else nothing."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def parsed(kind: type[Options], text: str, named: str) -> Options:
    """A dataclass of whole numbers from `tokens=10,ngram=3`. Raises InputError, of what is `named`."""
    known = {field.name: field.default for field in fields(kind)}
    values: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"(\w+)=([0-9]+)", part)
        if not match or match[1] not in known:
            choice = ", ".join(f"{name}={value}" for name, value in known.items())
            raise InputError(f"{named}: {part!r} is not understood; its options are {choice}")
        values[match[1]] = int(match[2])
    try:
        return kind(**values)
    except InputError as error:
        raise InputError(f"{named}: {error}") from None
