"""The interface of tree policies: the attributes that each declares, and the builder that it calls.

One cycle of DynamicTree(depth=2, topk=2, nodes=5) at the root r. A level drafts the children of the frontier;
it expands the two best of them. In the end the five best nodes, with the root, are kept:

    level 1      candidates  a .6   b .3             expands a b
    level 2      candidates  c .24  d .18  below a
                             e .15  f .15  below b   the last level: expands none
    kept tree    r ─┬─ a ─┬─ c        reach: r 1, a .6, b .3, c .24, d .18
                    │     └─ d        e and f are cut
                    └─ b
"""

from collections.abc import Generator
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from treespec.trees.ranges import Range

if TYPE_CHECKING:
    import numpy as np

    from treespec.trees.tree import TokenTree

# A generator. It yields a frontier and receives the draft logits [F, V] of its nodes' children, or it yields a
# tensor on a device and receives its copy on the host.
Growth: TypeAlias = "Generator[Any, Any, TokenTree]"


class TreeError(ValueError):
    """Raised for a tree that cannot be built. The message names the tree and the remedy."""

    exit_code = 2


class Builder(Protocol):
    """What `Policy.grow` builds one cycle's tree with. Each `grow_` method returns a generator (`Growth`).

    one_hot: whether this cycle's children are the most likely tokens, not draws.
    """

    @property
    def one_hot(self) -> bool: ...

    def predict_levels(self, depth: int, ranks: int) -> "Generator[Any, Any, np.ndarray]":
        """Returns [D, R] the largest probabilities of up to `depth` levels, before anything is drafted.

        ranks: the largest R.
        """
        ...

    def grow_fixed(self, shape: Any) -> Growth:
        """Grows a tree of a fixed shape. shape: a `StaticTree`."""
        ...

    def grow_confident(self, depth: int, threshold: float) -> Growth:
        """Grows a chain that ends below the first token of less draft probability than `threshold`."""
        ...

    def grow_ranked(self, depth: int, topk: int, nodes: int) -> Growth:
        """Grows the tree of the `nodes` most likely nodes, root included; each level expands `topk` nodes."""
        ...


class Policy:
    """Decides how many draws each node gets, and where the tree ends.

    A policy is a frozen dataclass. Its fields are its options.

    Attributes:
        name: on the command line (`--tree`).
        ranges: the allowed values of each option.
        reranks: whether it prunes nodes by draft probability; only if children are the most likely tokens.
        repeats: whether its tree then depends only on the draft logits, so that a CUDA graph can replay it.
        timed: whether it needs the measured cost of a cycle.
        may_draw: whether its children may be draws.
        at_once: whether it needs the distributions of all levels before the first.
        depth: the largest number of levels.

    Raises:
        TreeError: an option is out of its range.
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
        """The largest number of draws at a node; None: the scheme's own limit."""
        return None

    def __post_init__(self) -> None:
        for name, allowed in self.ranges.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise TreeError(f"{self.name} tree: {name} is {value}, must be {allowed}")

    @property
    def max_depth(self) -> int:
        """The largest number of levels of draft tokens."""
        return self.depth

    def grow(self, build: Builder) -> Growth:
        """Grows the tree of one cycle with the builder's methods."""
        raise NotImplementedError

    def adapt(self, accepted: int, drafted: int) -> "Policy":
        """Returns the policy of the sequence's next cycle. By default it stays.

        accepted: nodes that the last verification accepted. drafted: nodes of its tree, at least 1. The root does
        not count.
        """
        return self

    def __str__(self) -> str:
        """Returns the kind of tree and its options, for people."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        options = [f"{name}={value}" for name, value in values.items() if value is not None]
        return f"{self.name} tree ({', '.join(options)})"
