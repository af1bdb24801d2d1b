"""Builds the trees of one sequence with its policy, which calls a `CycleBuilder` (`treespec.trees.shape`)."""

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
    """Builds the trees of one sequence with a policy, and keeps what it learns between cycles.

    Attributes:
        policy: shapes the trees.
        scheme: makes the draws above temperature 0.
        calibration: the head's; None: it has none.
        costs: the measured cost by batch size; the first call measures it.
        choice: decides between its trees and those of a suffix cache.
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
        """Modelled seconds of the present cycle; None: the policy models no time."""
        return None

    def should_skip_cycle(self, params: SamplingParams, batch: int = 1) -> bool:
        """Whether the sequence drafts nothing in this cycle. Call it once a cycle, before `grow`.

        batch: the number of sequences that the cycle decodes together.
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
        """Grows the tree of one cycle.

        Args:
            root: [1] int64, the last committed token; [B, 1] of a batch whose trees grow together.
            logits: [1, V] draft logits of its children; [B, 1, V] of a batch.
            params: turn draft logits into the distribution that children are drawn from.
            generator: the source of randomness of the draws.
            ahead: returns [D, N] draft logits of all levels; None: the draft model drafts level by level.
        """
        scheme = self.scheme
        if params.greedy:  # the children are the most likely tokens under every scheme
            scheme = TopK()
        return self.grow_shape(CycleBuilder(root, logits, params, generator, scheme, ahead))

    def build_graph_key(self) -> Policy | None:
        """Returns the policy of this cycle if its tree depends only on the policy and the draft, else None."""
        if self.policy.repeats:
            return self.policy
        return None

    def grow_shape(self, cycle: "CycleBuilder") -> Growth:
        """Grows the tree of the present cycle."""
        return self.policy.grow(cycle)

    def update(self, path: Sequence[int]) -> None:
        """Learns from a verification. path: the accepted nodes, without the root."""


@dataclass(frozen=True)
class CycleBuilder:
    """Grows the tree of one sequence in one cycle; its policy calls these methods (`treespec.trees.shape.Builder`).

    Attributes:
        root, logits, params, generator, ahead: as in `TreeBuilder.grow`.
        scheme: makes the draws of this cycle.
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
        topk = min(ranks, levels.shape[1])
        if self.scheme.max_draws:
            topk = min(topk, self.scheme.max_draws)
        probabilities = yield select_topk(levels, topk)[0].double()
        return probabilities.numpy()

    def grow_fixed(self, shape: StaticTree) -> Growth:
        """Grows a tree of a fixed shape, with one draft step and one batch of draws for each level."""
        tokens = [self.root]
        levels = list[Drawn]()
        logits = self.logits
        layout = get_layout(shape, logits.device)
        level_above = None
        for level in layout.levels:
            # 1. The draft logits of the children of the level's inner nodes. An absent draw counts as token 0.
            if level_above is not None:
                frontier_tokens = tokens[-1][level.nodes - level_above.first].clamp_min(0)
                logits = yield Frontier(frontier_tokens, level.parent_rows)
            level_above = level

            # 2. The draws at all of these nodes.
            q, draws = self.draw(logits, level.draws)

            # 3. The children's tokens, and the draws that the verifier needs.
            tokens.append(draws.tokens[level.rows, level.columns])
            levels.append(Drawn(level.nodes, q, draws))
        drafts = None
        if not self.scheme.deterministic:
            drafts = concat_levels(levels)
        return TokenTree(torch.cat(tokens), layout.parents, layout.depth, layout.ancestors, drafts)

    def draw(self, logits: Tensor, counts: Tensor) -> tuple[Tensor, Draws]:
        """Draws children at F nodes; returns q [F, V] and the draws from it [F, K].

        A deterministic scheme ranks the logits themselves, and takes max(counts) tokens at each node.

        logits: [F, V]. counts: [F] int64 on the host, the number of draws at each node.
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
    """Grows EAGLE-2's tree: it ranks paths by log-probability (`treespec.trees.dynamic`).

    The score of a node is that of its path; no child's score is above its parent's.

    Attributes:
        depth: the largest number of levels.
        topk: children per node.
        nodes: N to keep after the last level, the root included.
        expanded: nodes to expand per level; None: topk of them.
    """

    depth: int
    topk: int
    nodes: int
    expanded: int | None = None

    def score_children(
        self, above: Tensor | None, logits: Tensor, depth: int
    ) -> tuple[Tensor, Tensor]:
        """Returns [..., F, K] tokens and scores of the most likely children of F nodes, the most likely first.

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
        """Returns the number of nodes of a level to expand, the best ones; 0 ends the tree.

        level: from 1, the level of the nodes. scores: [..., M] of each level so far.
        """
        if level >= self.depth:
            return 0
        if self.expanded is None:
            return self.topk
        return self.expanded

    def grow(self, root: Tensor, logits: Tensor) -> Growing[tuple[TokenTree, Tensor]]:
        """Grows the tree; returns it and the columns [N] that it keeps (`select_best_tree`).

        root: [1] int64. logits: [1, V] draft logits of its children. With [B, 1] and [B, 1, V] the
        trees of a batch grow together, and all that is yielded and returned is [B, ...].
        """
        level_tokens = [root]
        orders = list[Tensor]()
        scores = list[Tensor]()
        above = None
        for level in range(1, self.depth + 1):
            # 1. The most likely children of each frontier node are candidates.
            tokens, reach = self.score_children(above, logits, level - 1)  # [..., F, K]
            level_tokens.append(tokens.flatten(-2))
            scores.append(reach.flatten(-2))

            # 2. The best of them are the next frontier. If all of them are expanded, they keep their order.
            expanded = self.choose_width(level, scores)
            if not expanded:
                break
            above = scores[-1]
            frontier_tokens = level_tokens[-1]
            order = build_range(above.shape[-1], root.device).expand_as(frontier_tokens)
            if expanded < above.shape[-1]:
                above, best = above.sort(descending=True, stable=True)
                above = above[..., :expanded]
                order = to_device(best[..., :expanded], root.device)
                frontier_tokens = frontier_tokens.gather(-1, order)
            orders.append(order)
            frontier_logits = yield Frontier(frontier_tokens, order, tokens.shape[-1])
            logits = frontier_logits.unflatten(0, frontier_tokens.shape)

        # 3. Keep the best of all candidates.
        return select_best_tree(level_tokens, orders, scores, self.nodes)
