"""The seam of drafting: whatever proposes a token tree for each of B texts."""

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treespec.draft.per_text import Observer
from treespec.model.cache import TreeCache
from treespec.model.target import TreeOutput
from treespec.shaping.distribution import Distribution
from treespec.trees.shape import Policy
from treespec.trees.tree import TokenTree

if TYPE_CHECKING:
    from treespec.draft.cost.model import CostBy


class Drafter(Observer):
    """Observes B texts, one at first, and drafts for them.

    The calls of a cycle: draft_trees, settle, observe.

    `TreeDrafter` grows trees over any draft model (`treespec.draft.proposer`). Drafters without a
    model return whole trees.

    name: for people; "" stands for its class. policy: of the trees that it grows; None: their shape
    is its own. one_hot: whether its tokens lack a draft distribution. forward_seconds: seconds spent in a
    draft model's forwards so far.
    """

    name: str = ""
    policy: Policy | None = None
    one_hot: bool = False
    forward_seconds: float = 0.0

    @property
    def timed(self) -> bool:
        """Whether the trees depend on measured times."""
        return False

    def enter(self, memory: str | None) -> None:
        """A text begins in the only row. memory: which answers it may draft from; None: from none.

        A drafter that keeps no answers does nothing here, nor in `remember`.
        """
        return

    def remember(self, memory: str, answer: Sequence[int]) -> None:
        """An answer has ended. It begins with the last tokens of its prompt."""
        return

    @abstractmethod
    def draft_trees(
        self,
        roots: Tensor,
        laws: Sequence[Distribution],
        generators: Sequence[torch.Generator],
        cache: TreeCache,
        now: Callable[[], float] = time.perf_counter,
    ) -> list[TokenTree]:
        """The tree below the last committed token of each text.

        roots: [B] int64. laws: of each text. cache: the target's. A drafter may write behind the committed texts, and
        leaves the cache as it found it. now: the clock in seconds that times forwards.
        """

    @abstractmethod
    def settle(self, paths: Sequence[Sequence[int]], outs: Sequence[TreeOutput]) -> None:
        """Feedback after a cycle: accepted nodes of each tree, and the target's output on it.

        paths: by text, without the root.
        """

    def paced(self, times: "CostBy") -> "Drafter":
        """As `new`, for a verifier that takes any tree. It drafts no more than pays, if it can.

        times: measures when it is called first.
        """
        return self.new()
