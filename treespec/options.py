"""Configuration dataclasses whose fields are command-line options: said once, saved beside every result."""

from dataclasses import MISSING, field
from typing import Any

from treespec.errors import InputError


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
