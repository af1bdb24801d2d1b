"""Configuration dataclasses whose fields are command-line options: said once, saved beside every result."""

from dataclasses import MISSING, field
from typing import Any


def option(help: str, default: Any = MISSING) -> Any:
    """A dataclass field with the help of its option; without a default the option is required."""
    metadata = {"help": help}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)
