"""Builds the trees of one sequence, as its policy asks (`treespec.trees.shape.Builder`)."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from treespec.draft.calibration import Calibration
from treespec.draft.cost.model import CostBy
from treespec.draft.grow.drawn import Confident, Sampled, grow_confident, grow_sampled
from treespec.draft.grow.fixed import grow_fixed
from treespec.draft.grow.growth import Growth
from treespec.draft.grow.ranked import Ranked, grow_ranked
from treespec.shaping.sampling import SamplingParams, largest, probs
from treespec.trees.shape import Policy
from treespec.trees.static import StaticTree
from treespec.verify.distributions import takes_sure_tokens
from treespec.verify.scheme import Scheme
from treespec.verify.topk import TopK

P = TypeVar("P", bound=Policy)


class TreeBuilder(Generic[P]):
    """The trees of one sequence by a policy of type P.

    scheme: makes the draws. calibration: of the head, where it has one. costs: the measured cost by
    batch size; called where a cycle needs it. known: what the policy learned from the sequence.
    ahead: gives the draft logits [D, N] of all levels of the next tree, where a draft model has them
    at once.
    """

    ahead: Callable[[], Tensor] | None = None

    def __init__(
        self,
        policy: P,
        scheme: Scheme,
        calibration: Calibration | None = None,
        costs: CostBy | None = None,
    ) -> None:
        self.policy, self.drawing = policy, scheme
        self.calibration, self.costs = calibration, costs
        self.known, self.drafted = policy.first, -1  # -1: the sequence had no tree in this cycle

    @property
    def seconds(self) -> float | None:
        """Modelled seconds of the cycle that runs; None: the policy models no time."""
        return None

    def pauses(self, params: SamplingParams, batch: int = 1) -> bool:
        """Whether the sequence has no drafts in this cycle. Called once a cycle, before `grow`.

        batch: sequences that the cycle decodes together.
        """
        return False

    def grow(
        self, root: Tensor, logits: Tensor, params: SamplingParams, generator: torch.Generator
    ) -> Growth:
        """Grow the tree of one cycle.

        root: [1] int64, the last committed token. logits: [1, V] draft logits of its children.
        """
        self.root, self.logits, self.params, self.generator = root, logits, params, generator
        tree = yield from self.policy.grow(self, self.known)
        self.drafted = len(tree.tokens) - 1
        return tree

    def update(self, path: Sequence[int]) -> None:
        """Learn from a verdict. path: the accepted nodes, without the root."""
        if self.drafted >= 0:
            self.known = self.policy.update(self.known, len(path), self.drafted)
        self.drafted = -1

    @property
    def scheme(self) -> Scheme:
        """Of a cycle: at temperature 0 the most likely tokens, whatever the scheme."""
        return TopK() if self.params.greedy else self.drawing

    @property
    def one_hot(self) -> bool:
        return self.scheme.deterministic

    def levels(self, depth: int, ranks: int) -> np.ndarray:
        assert self.ahead
        laws = probs(self.ahead()[:depth], self.params)
        most = min(ranks, self.scheme.max_draws or ranks, laws.shape[1])
        return largest(laws, most)[0].double().cpu().numpy()

    def fixed(self, shape: StaticTree) -> Growth:
        return grow_fixed(self.root, self.logits, shape, self.scheme, self.params, self.generator)

    def ranked(self, depth: int, topk: int, nodes: int) -> Growth:
        tree, _ = yield from grow_ranked(self.root, self.logits, Ranked(depth, topk, nodes))
        return tree

    def drawn(self, depth: int, price: float) -> Growth:
        assert self.calibration
        assert takes_sure_tokens(self.drawing)
        by = Sampled(self.drawing, self.calibration, depth, price)
        return grow_sampled(self.root, self.logits, by, self.params, self.generator)

    def chain(self, depth: int, threshold: float) -> Growth:
        by = Confident(self.scheme, depth, threshold)
        return grow_confident(self.root, self.logits, by, self.params, self.generator)
