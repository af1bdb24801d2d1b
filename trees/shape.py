"""The seam of tree policies: what each declares, and what it grows a tree with."""

from collections.abc import Generator
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from treespec.trees.ranges import Range

if TYPE_CHECKING:
    import numpy as np

    from treespec.trees.tree import TokenTree

# Yields the nodes whose children are to be drafted and is sent the draft logits [F, V] below them, or
# a tensor and is sent its numbers on the host.
Growth: TypeAlias = "Generator[Any, Any, TokenTree]"


class TreeError(ValueError):
    """A tree that cannot be built. The message names the tree and the remedy."""

    exit_code = 2


class Builder(Protocol):
    """Builds one cycle's tree in any of these ways; each is the growth of that tree.

    one_hot: whether this cycle's children are the most likely tokens, not draws.
    """

    @property
    def one_hot(self) -> bool: ...

    def predict_levels(self, depth: int, ranks: int) -> "Generator[Any, Any, np.ndarray]":
        """[D, R] the largest probabilities of up to `depth` levels, of a head that has all at once."""
        ...

    def grow_fixed(self, shape: Any) -> Growth:
        """A `StaticTree`."""
        ...

    def grow_ranked(self, depth: int, topk: int, nodes: int) -> Growth:
        """The `nodes` most likely nodes, the root included; each level expands `topk` nodes."""
        ...


class Policy:
    """How many draws each node gets, and where the tree stops.

    A policy is a frozen dataclass; its fields are its options, and `ranges` says what they may be.
    Raises TreeError for an option out of its range.

    name: on the command line (`--tree`). reranks: it keeps nodes by the drafted tokens where they
    are the most likely ones. repeats: the draft logits alone decide its tree there. timed: it needs
    the measured cost of a cycle. may_draw: its children may be draws. at_once: it needs
    the distributions of all levels before the first. max_draws: at a node; None: no more than the scheme
    answers. depth: the largest number of levels.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    name: ClassVar[str]
    ranges: ClassVar[dict[str, Range]] = {}
    reranks: ClassVar[bool] = False
    repeats: ClassVar[bool] = False
    timed: ClassVar[bool] = False
    may_draw: ClassVar[bool] = True
    at_once: ClassVar[bool] = False
    depth: int

    @property
    def max_draws(self) -> int | None:
        return None

    def __post_init__(self) -> None:
        for name, allowed in self.ranges.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise TreeError(f"{self.name} tree: {name} is {value}, must be {allowed}")

    @property
    def max_depth(self) -> int:
        """The largest number of levels of drafted tokens."""
        return self.depth

    def grow(self, build: Builder) -> Growth:
        """One cycle's tree."""
        raise NotImplementedError

    def __str__(self) -> str:
        """The kind of tree and its options."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        options = [f"{name}={value}" for name, value in values.items() if value is not None]
        return f"{self.name} tree ({', '.join(options)})"
