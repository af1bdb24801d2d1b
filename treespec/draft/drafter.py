"""The seam of drafting: whatever proposes a token tree for each of B texts."""

from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from treespec.cache import TreeCache
from treespec.sampling import SamplingParams
from treespec.target import TreeOutput
from treespec.trees.tree import TokenTree


class Drafter(Protocol):
    """Holds what it knows of B texts. All calls of a cycle: draft_trees, settle, observe.

    `TreeDrafter` is one for every draft model (`treespec.draft.proposer`); those without a model hand over a tree.
    """

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose inputs it wants as features; () is the last hidden state."""
        ...

    @property
    def lengths(self) -> list[int]:
        """Positions of each text that it has observed."""
        ...

    @property
    def forward_seconds(self) -> float:
        """Seconds spent in a draft model's forwards so far."""
        ...

    def draft_trees(
        self, roots: Tensor, params: SamplingParams, generators: Sequence[torch.Generator], cache: TreeCache
    ) -> list[TokenTree]:
        """The tree below the last committed token of each text. roots: [B] int64. cache: the target's.

        Behind the committed texts the cache may be written; it is left as it was found.
        """
        ...

    def settle(self, paths: Sequence[Sequence[int]], outs: Sequence[TreeOutput]) -> None:
        """A cycle has ended. paths: each tree's accepted nodes, without the root. outs: the target's on each tree."""
        ...

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        """Each text grew: features [n, H] of its next n positions, their tokens and the one after them, [n + 1]."""
        ...

    def rewind(self, lengths: Sequence[int]) -> None:
        """Other texts begin, of which the first so many positions are known."""
        ...

    def new(self) -> Self:
        """Another of its kind, with one text of which it knows nothing."""
        ...

    def join(self, others: Sequence[Self]) -> None:
        """Append the texts of others, which begin now."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep these texts, in this order."""
        ...
