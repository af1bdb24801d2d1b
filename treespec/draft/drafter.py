"""The seam of drafting: whatever proposes a token tree for each of B texts."""

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

from treespec.cache import TreeCache
from treespec.draft.per_text import PerText
from treespec.sampling import SamplingParams
from treespec.target import TreeOutput
from treespec.trees.shape import Policy
from treespec.trees.tree import TokenTree

if TYPE_CHECKING:
    from treespec.draft.pace.times import Times


class Drafter(PerText, Protocol):
    """Observes B texts, one at first, and drafts for them. The calls of a cycle: draft_trees,
    settle, observe.

    `TreeDrafter` grows trees over any draft model (`treespec.draft.proposer`); drafters without a
    model hand over whole trees.

    name: as people are shown it; "" is its class. policy: of the trees that it grows; None: their
    shape is its own. given: its tokens have no draft law. forward_seconds: seconds spent in a draft
    model's forwards so far.
    """

    name: str = ""
    policy: Policy | None = None
    given: bool = False
    forward_seconds: float = 0.0

    @property
    def timed(self) -> bool:
        """Whether the trees depend on measured times."""
        return False

    @property
    @abstractmethod
    def taps(self) -> tuple[int, ...]:
        """Target layers whose inputs it observes as features; () is the last hidden state."""

    @property
    @abstractmethod
    def lengths(self) -> list[int]:
        """Positions of each text that it has observed."""

    @abstractmethod
    def draft_trees(
        self,
        roots: Tensor,
        params: SamplingParams,
        generators: Sequence[torch.Generator],
        cache: TreeCache,
        now: Callable[[], float] = time.perf_counter,
    ) -> list[TokenTree]:
        """The tree below the last committed token of each text.

        roots: [B] int64. cache: the target's; behind the committed texts it may be written, and it
        is left as it was found. now: the clock, in seconds, that forwards are timed by.
        """

    @abstractmethod
    def settle(self, paths: Sequence[Sequence[int]], outs: Sequence[TreeOutput]) -> None:
        """Feedback after a cycle: each tree's accepted nodes, without the root, and the target's
        output on it.
        """

    @abstractmethod
    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        """Each text grew: features [n, H] of its next n positions, their tokens and the one after
        them, [n + 1].
        """

    @abstractmethod
    def rewind(self, lengths: Sequence[int]) -> None:
        """Other texts begin, which share the first `lengths` observed positions."""

    @abstractmethod
    def new(self) -> Self:
        """Another drafter with the same options, with one text of which it knows nothing."""

    def paced(self, times: "Callable[[], Times]") -> "Drafter":
        """As `new`, for a verifier that takes any tree: one that drafts no more than pays by the
        times, if it can.
        """
        return self.new()
