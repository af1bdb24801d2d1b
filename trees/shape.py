"""The seam of tree policies: the capabilities that each policy states."""

from dataclasses import Field
from typing import ClassVar, Protocol


class Policy(Protocol):
    """How many draws each node gets, and where the tree stops.

    A policy is a frozen dataclass; its fields are its options. It inherits the defaults below.
    name: the policy's name on the command line (`--tree`).
    """

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]
    name: ClassVar[str]

    @property
    def max_depth(self) -> int:
        """The largest number of levels of drafted tokens."""
        ...

    @property
    def reranks(self) -> bool:
        """Whether it keeps nodes by the drafted tokens, which only deterministic draws allow."""
        return False

    @property
    def timed(self) -> bool:
        """Whether it needs the measured times of forwards and draft steps."""
        return False

    def __str__(self) -> str:
        """The kind of tree and its options."""
        options = [f"{name}={value}" for name, value in vars(self).items() if value is not None]
        return f"{self.name} tree ({', '.join(options)})"
