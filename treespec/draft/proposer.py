"""The seam of draft models: draft logits for tree nodes, a level at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from treespec.cache import TreeCache


@dataclass(frozen=True)
class Frontier:
    """Nodes whose children are to be drafted. tokens: [F]; parent_rows: [F] in the frontier above, 0 of the root.

    The tokens are draft tokens, numbered as the logits.
    """

    tokens: Tensor
    parent_rows: Tensor


class Proposer(Protocol):
    """Holds what it knows of B texts. All calls of a cycle: begin, extend for each level, observe.

    One that is made of M draft models gives logits [F, M, N] for [F, N] (`treespec.draft.models.several`).
    """

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose inputs it wants as features; () is the last hidden state."""
        ...

    @property
    def max_depth(self) -> int | None:
        """Levels that it can draft; None: any number."""
        ...

    @property
    def lengths(self) -> list[int]:
        """Positions of each text that it has observed."""
        ...

    @property
    def identity(self) -> object:
        """What the cost of its forwards depends on, as JSON holds it."""
        ...

    @property
    def vocab_size(self) -> int:
        """V of the target."""
        ...

    @property
    def vocabulary(self) -> Tensor | None:
        """[N] int64 ascending: the target's token for each of its draft tokens; None where they are the same."""
        ...

    @property
    def forward_seconds(self) -> float:
        """Seconds spent in the draft model's own forwards so far."""
        ...

    def begin(self, roots: Tensor, cache: TreeCache) -> list[Tensor | None]:
        """Of each text [1, N] draft logits for the children of the root, or None if it knows nothing of it yet.

        roots: [B] int64. cache: the target's keys and values of the committed texts, for drafts by the target itself;
        what is written behind them is forgotten.
        """
        ...

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        """Of each text [F, N] draft logits for the children of its frontier, [0, N] where it has none."""
        ...

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        """Each text grew: features [n, H] of its next n positions, their tokens and the one after them, [n + 1]."""
        ...

    def rewind(self, lengths: Sequence[int]) -> None:
        """Keep only so many observed positions of each text."""
        ...

    def new(self) -> Self:
        """Another of its kind, with one text of which it knows nothing."""
        ...

    def join(self, others: Sequence[Self]) -> None:
        """Append the texts of others."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep these texts, in this order."""
        ...
