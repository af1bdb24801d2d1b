"""Builds the trees of one sequence, as its policy asks (`treespec.trees.shape.Builder`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treespec.draft.auto.cost import CostBy
from treespec.draft.auto.cost_model import CacheOrModel
from treespec.draft.calibration import Calibration
from treespec.draft.drafter import Frontier
from treespec.draft.tree_assembly import (
    Drawn,
    Growing,
    Growth,
    concat_levels,
    select_best_tree,
)
from treespec.sampling.probs import SamplingParams, compute_probs, select_topk
from treespec.trees.layout import get_layout
from treespec.trees.shape import Policy
from treespec.trees.static import StaticTree
from treespec.trees.tree import Draws, TokenTree, build_range, to_device
from treespec.verify.scheme import Scheme
from treespec.verify.topk import TopK


class TreeBuilder:
    """The trees of one sequence by a policy.

    scheme: makes the draws above temperature 0. calibration: of the head, where it has one. costs: the
    measured cost by batch size; called where a cycle needs it.
    choice: between its trees and a suffix cache's.
    """

    def __init__(
        self,
        policy: Policy,
        scheme: Scheme,
        calibration: Calibration | None = None,
        costs: CostBy | None = None,
    ) -> None:
        self.policy = policy
        self.scheme = scheme
        self.calibration = calibration
        self.costs = costs
        self.choice = CacheOrModel()

    @property
    def seconds(self) -> float | None:
        """Modelled seconds of the cycle that runs; None: the policy models no time."""
        return None

    def should_skip_cycle(self, params: SamplingParams, batch: int = 1) -> bool:
        """Whether the sequence has no drafts in this cycle. Called once a cycle, before `grow`.

        batch: sequences that the cycle decodes together.
        """
        return False

    def grow(
        self,
        root: Tensor,
        logits: Tensor,
        params: SamplingParams,
        generator: torch.Generator,
        ahead: Callable[[], Tensor] | None = None,
    ) -> Growth:
        """Grow the tree of one cycle.

        Args:
            root: [1] int64, the last committed token; [B, 1] of a batch whose trees grow together.
            logits: [1, V] draft logits of its children; [B, 1, V] of a batch.
            params: how draft logits become the distribution that children are drawn from.
            generator: of the draws.
            ahead: gives the draft logits [D, N] of all levels, where a draft model has them at once.
        """
        scheme = self.scheme
        if params.greedy:  # the most likely tokens, whatever the scheme
            scheme = TopK()
        return self.grow_shape(CycleBuilder(root, logits, params, generator, scheme, ahead))

    def build_graph_key(self) -> Policy | None:
        """What shapes the tree of the cycle that runs, if that and the draft alone do."""
        if self.policy.repeats:
            return self.policy
        return None

    def grow_shape(self, cycle: "CycleBuilder") -> Growth:
        """The tree of the cycle that runs."""
        return self.policy.grow(cycle)

    def update(self, path: Sequence[int]) -> None:
        """Learn from a verdict. path: the accepted nodes, without the root."""


@dataclass(frozen=True)
class CycleBuilder:
    """Grows the tree of one sequence in one cycle, as its policy asks (`treespec.trees.shape.Builder`).

    root, logits, params, generator, ahead: as `TreeBuilder.grow` takes them. scheme: makes the draws of
    this cycle.
    """

    root: Tensor
    logits: Tensor
    params: SamplingParams
    generator: torch.Generator
    scheme: Scheme
    ahead: Callable[[], Tensor] | None = None

    @property
    def one_hot(self) -> bool:
        return self.scheme.deterministic

    def predict_levels(self, depth: int, ranks: int) -> Growing[np.ndarray]:
        assert self.ahead
        levels = compute_probs(self.ahead()[:depth], self.params)
        most = min(ranks, levels.shape[1])
        if self.scheme.max_draws:
            most = min(most, self.scheme.max_draws)
        top = yield select_topk(levels, most)[0].double()
        return top.numpy()

    def grow_fixed(self, shape: StaticTree) -> Growth:
        """One draft step and one batch of draws for each level."""
        tokens = [self.root]
        levels = list[Drawn]()
        logits = self.logits
        fixed = get_layout(shape, logits.device)
        above = None
        for level in fixed.levels:
            # 1. The draft logits below the level's inner nodes. A child whose draw is absent is
            #    drafted for as token 0.
            if above is not None:
                last = tokens[-1][level.nodes - above.first].clamp_min(0)
                logits = yield Frontier(last, level.parent_rows)
            above = level

            # 2. The draws at all of these nodes.
            q, draws = self.draw(logits, level.draws)

            # 3. The children's tokens, and what the verifier needs.
            tokens.append(draws.tokens[level.rows, level.columns])
            levels.append(Drawn(level.nodes, q, draws))
        drafts = None
        if not self.scheme.deterministic:
            drafts = concat_levels(levels)
        return TokenTree(torch.cat(tokens), fixed.parents, fixed.depth, fixed.ancestors, drafts)

    def draw(self, logits: Tensor, counts: Tensor) -> tuple[Tensor, Draws]:
        """q [F, V] at F nodes, and the draws from it [F, K].

        logits: [F, V]. counts: [F] draws at each node. A scheme whose draws are a function of q takes the
        logits for it, and as many draws at each node as the most that one has.
        """
        if self.scheme.deterministic:
            return logits, self.scheme.draw(logits, int(counts.max()), self.generator)
        q = compute_probs(logits, self.params)
        return q, self.scheme.draw(q, counts, self.generator)

    def grow_ranked(self, depth: int, topk: int, nodes: int) -> Growth:
        tree, _ = yield from TopRanking(depth, topk, nodes).grow(self.root, self.logits)
        return tree


@dataclass
class TopRanking:
    """EAGLE-2's ranking by log-probability (`treespec.trees.dynamic`).

    depth: levels, at most. topk: children per node. nodes: N to keep, the root included, once the
    last level is there. expanded: nodes per level; None: topk of them. Scores are those of paths; no
    child's is above its parent's.
    """

    depth: int
    topk: int
    nodes: int
    expanded: int | None = None

    def score_children(
        self, above: Tensor | None, logits: Tensor, depth: int
    ) -> tuple[Tensor, Tensor]:
        """[..., F, K] tokens and scores of the most likely children of F nodes, the most likely first.

        above: [..., F] scores of the nodes; None for the root. logits: [..., F, V]. depth: of the nodes.
        """
        rows = logits
        if logits.shape[-2] > 1 and logits.stride(-2) == 0:  # one distribution for the whole level
            rows = logits[..., :1, :]
        topk = min(self.topk, logits.shape[-1])
        scores, tokens = select_topk(rows.log_softmax(-1, torch.float32), topk)
        tokens = tokens.expand(logits.shape[:-1] + (topk,))
        if above is None:
            return tokens, scores
        return tokens, above[..., None] + scores

    def choose_width(self, level: int, scores: list[Tensor]) -> int:
        """How many of the best nodes of a level to expand; 0 ends the tree. scores: of all levels."""
        if level >= self.depth:
            return 0
        if self.expanded is None:
            return self.topk
        return self.expanded

    def grow(self, root: Tensor, logits: Tensor) -> Growing[tuple[TokenTree, Tensor]]:
        """The growth of the tree, and the columns [N] that it keeps (`select_best_tree`).

        root: [1] int64. logits: [1, V] draft logits of its children. With [B, 1] and [B, 1, V] the
        trees of a batch grow together: all that it yields and returns is [B, ...] then.
        """
        drafted = [root]
        orders = list[Tensor]()
        scores = list[Tensor]()
        above = None
        for level in range(1, self.depth + 1):
            # 1. The most likely children of each frontier node are candidates.
            tokens, reach = self.score_children(above, logits, level - 1)  # [..., F, K]
            drafted.append(tokens.flatten(-2))
            scores.append(reach.flatten(-2))

            # 2. The best of them are the next frontier. Where it is all, no order is needed.
            expanded = self.choose_width(level, scores)
            if not expanded:
                break
            above = scores[-1]
            last = drafted[-1]
            order = build_range(above.shape[-1], root.device).expand_as(last)
            if expanded < above.shape[-1]:
                above, best = above.sort(descending=True, stable=True)
                above = above[..., :expanded]
                order = to_device(best[..., :expanded], root.device)
                last = last.gather(-1, order)
            orders.append(order)
            below = yield Frontier(last, orders[-1], tokens.shape[-1])
            logits = below.unflatten(0, last.shape)

        # 3. Keep the best of all candidates.
        return select_best_tree(drafted, orders, scores, self.nodes)
