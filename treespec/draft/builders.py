"""Builds the trees of one sequence, as its policy asks (`treespec.trees.shape.Builder`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treespec.draft.auto.cost import CostBy
from treespec.draft.auto.cost_model import Choice
from treespec.draft.calibration import Calibration
from treespec.draft.drafter import Frontier
from treespec.draft.tree_assembly import (
    Drawn,
    Growing,
    Growth,
    best_tree,
    drafts_of,
)
from treespec.sampling.probs import SamplingParams, largest, probs
from treespec.trees.layout import layout
from treespec.trees.shape import Policy
from treespec.trees.static import StaticTree
from treespec.trees.tree import TokenTree, columns, sent
from treespec.verify.scheme import Scheme
from treespec.verify.topk import TopK


class TreeBuilder:
    """The trees of one sequence by a policy.

    scheme: makes the draws. calibration: of the head, where it has one. costs: the measured cost by
    batch size; called where a cycle needs it.
    choice: between its trees and a suffix cache's. ahead: gives the draft logits [D, N] of all levels
    of the next tree, where a draft model has them at once.
    """

    ahead: Callable[[], Tensor] | None = None

    def __init__(
        self,
        policy: Policy,
        scheme: Scheme,
        calibration: Calibration | None = None,
        costs: CostBy | None = None,
    ) -> None:
        self.policy = policy
        self.drawing = scheme
        self.calibration = calibration
        self.costs = costs
        self.choice = Choice()

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
        self.root = root
        self.logits = logits
        self.params = params
        self.generator = generator
        return (yield from self.shaped())

    def settled(self) -> Policy | None:
        """What shapes the tree of the cycle that runs, if that and the draft alone do."""
        return self.policy if self.policy.repeats else None

    def shaped(self) -> Growth:
        """The tree of the cycle that runs."""
        return self.policy.grow(self)

    def update(self, path: Sequence[int]) -> None:
        """Learn from a verdict. path: the accepted nodes, without the root."""

    @property
    def scheme(self) -> Scheme:
        """Of a cycle: at temperature 0 the most likely tokens, whatever the scheme."""
        return TopK() if self.params.greedy else self.drawing

    @property
    def one_hot(self) -> bool:
        return self.scheme.deterministic

    def levels(self, depth: int, ranks: int) -> Growing[np.ndarray]:
        assert self.ahead
        levels = probs(self.ahead()[:depth], self.params)
        most = min(ranks, self.scheme.max_draws or ranks, levels.shape[1])
        return (yield largest(levels, most)[0].double()).numpy()

    def fixed(self, shape: StaticTree) -> Growth:
        """One draft step and one batch of draws for each level."""
        tokens = [self.root]
        levels = list[Drawn]()
        logits = self.logits
        scheme = self.scheme
        fixed = layout(shape, logits.device)
        for above, level in zip((None, *fixed.levels[:-1]), fixed.levels, strict=True):
            # 1. The draft logits below the level's inner nodes. A child whose draw is absent is
            #    drafted for as token 0.
            if above:
                last = tokens[-1][level.nodes - above.first].clamp_min(0)
                logits = yield Frontier(last, level.parent_rows)

            # 2. The draws at all of these nodes.
            q = logits if scheme.deterministic else probs(logits, self.params)
            k = int(level.draws.max()) if scheme.deterministic else level.draws
            drawn = scheme.draw(q, k, self.generator)  # [F, K]

            # 3. The children's tokens, and what the verifier needs.
            tokens.append(drawn.tokens[level.rows, level.columns])
            levels.append((level.nodes, q, drawn))
        drafts = None if scheme.deterministic else drafts_of(levels)
        parts = fixed.parents, fixed.depth, fixed.ancestors
        return TokenTree(torch.cat(tokens), *parts, drafts)

    def ranked(self, depth: int, topk: int, nodes: int) -> Growth:
        tree, _ = yield from Ranked(depth, topk, nodes).grow(self.root, self.logits)
        return tree


@dataclass
class Ranked:
    """EAGLE-2's ranking by log-probability (`treespec.trees.dynamic`).

    depth: levels, at most. topk: children per node. nodes: N to keep, the root included, once the
    last level is there. expanded: nodes per level; None: topk of them. Scores are those of paths; no
    child's is above its parent's.
    """

    depth: int
    topk: int
    nodes: int
    expanded: int | None = None

    def below(self, above: Tensor | None, logits: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """[..., F, K] tokens and scores of the most likely children of F nodes, the most likely first.

        above: [..., F] scores of the nodes; None for the root. logits: [..., F, V]. depth: of the nodes.
        """
        *nodes, size = logits.shape
        shared = nodes[-1] > 1 and logits.stride(-2) == 0  # one distribution for the whole level
        rows = logits[..., :1, :] if shared else logits
        best, tokens = largest(rows.log_softmax(-1, torch.float32), min(self.topk, size))
        return tokens.expand(*nodes, -1), best if above is None else above[..., None] + best

    def width(self, level: int, scores: list[Tensor]) -> int:
        """How many of the best nodes of a level to expand; 0 ends the tree. scores: of all levels."""
        return (self.expanded or self.topk) if level < self.depth else 0

    def grow(self, root: Tensor, logits: Tensor) -> Growing[tuple[TokenTree, Tensor]]:
        """The growth of the tree, and the columns [N] that it keeps (`best_tree`).

        root: [1] int64. logits: [1, V] draft logits of its children. With [B, 1] and [B, 1, V] the
        trees of a batch grow together: all that it yields and returns is [B, ...] then.
        """
        drafted = [root]
        orders = list[Tensor]()
        scores = list[Tensor]()
        above = None
        for level in range(1, self.depth + 1):
            # 1. The most likely children of each frontier node are candidates.
            tokens, reach = self.below(above, logits, level - 1)  # [..., F, K]
            drafted.append(tokens.flatten(-2))
            scores.append(reach.flatten(-2))

            # 2. The best of them are the next frontier. Where it is all, no order is needed.
            expanded = self.width(level, scores)
            if not expanded:
                break
            above = scores[-1]
            last = drafted[-1]
            order = columns(above.shape[-1], root.device).expand_as(last)
            if expanded < above.shape[-1]:
                above, best = above.sort(descending=True, stable=True)
                above = above[..., :expanded]
                order = sent(best[..., :expanded], root.device)
                last = last.gather(-1, order)
            orders.append(order)
            below = yield Frontier(last, orders[-1], tokens.shape[-1])
            logits = below.unflatten(0, last.shape)

        # 3. Keep the best of all candidates.
        return best_tree(drafted, orders, scores, self.nodes)
