"""The seam of tree policies: what each says of itself."""

from dataclasses import Field
from typing import Any, ClassVar, Protocol


class Policy(Protocol):
    """How many draws each node gets, and when a tree stops. A policy inherits the defaults below.

    A policy is a frozen dataclass: its fields are the options of its name. name: as `--tree` takes
    it.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    name: ClassVar[str]

    @property
    def max_depth(self) -> int:
        """Levels of drafted tokens, at most."""
        ...

    @property
    def reranks(self) -> bool:
        """Whether it keeps nodes by what was drafted, which only deterministic children allow."""
        return False

    @property
    def timed(self) -> bool:
        """Whether it chooses trees by measured times."""
        return False

    def __str__(self) -> str:
        """The kind of tree and its numbers."""
        numbers = ", ".join(
            f"{name}={value}" for name, value in vars(self).items() if value is not None
        )
        return f"{self.name} tree ({numbers})"
