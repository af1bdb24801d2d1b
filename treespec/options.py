"""Configuration dataclasses whose fields are command-line options: said once, saved beside every result."""

import re
from dataclasses import MISSING, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from treespec.errors import InputError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")


def option(help: str, default: Any = MISSING) -> Any:
    """A dataclass field with the help of its option; without a default the option is required."""
    metadata = {"help": help}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


def at_least(config: Any, **bounds: int) -> None:
    """Raises InputError for a field that is given and below its bound."""
    for name, bound in bounds.items():
        value = getattr(config, name)
        if value is not None and value < bound:
            raise InputError(f"--{name.replace('_', '-')} is {value}, must be at least {bound}")


DRAFTER = (
    "what drafts in place of --head: eagle:HEAD (or eagle3, medusa, hydra, hydra++), model:PATH, self:FILE, "
    "sparse:512, lookup, rest:DATASTORE, lookahead or jacobi"
)

TRUST = "run Python files that the target's directory or repository brings; read them first"


def one_source(config: Any) -> None:
    """Raises InputError unless one of `head` and `drafter` is given."""
    if (config.head is None) == (config.drafter is None):
        raise InputError(f"give {'--head or --drafter' if config.head is None else 'only one of --head and --drafter'}")


def bounded(options: Any, **bounds: int) -> None:
    """`at_least` for options inside of one, as in lookup:tokens=10."""
    for name, bound in bounds.items():
        if getattr(options, name) < bound:
            raise InputError(f"{name} is {getattr(options, name)}, must be at least {bound}")


def parsed(kind: type[Options], text: str, named: str) -> Options:
    """A dataclass of whole numbers from `tokens=10,ngram=3`. Raises InputError, of what is `named`."""
    known = {field.name: field.default for field in fields(kind)}
    values: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"(\w+)=(\d+)", part)
        if not match or match[1] not in known:
            choice = ", ".join(f"{name}={value}" for name, value in known.items())
            raise InputError(f"{named}: {part!r} is not understood; its options are {choice}")
        values[match[1]] = int(match[2])
    try:
        return kind(**values)
    except InputError as error:
        raise InputError(f"{named}: {error}") from None
