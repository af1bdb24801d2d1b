"""Grows EAGLE-2's tree: it ranks paths by log-probability (`treespec.trees.dynamic`).

The score of a node is that of its path; no child's score is above its parent's. `TopRanking` grows the trees of a
batch together, on any device. One sequence on a CPU has a few hundred numbers: `HostRanking` ranks them in plain
Python, and both grow the same tree.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treespec.draft.best_tree import (
    CandidateLevel,
    RankedTree,
    rank_descending,
    select_best_on_host,
    select_best_tree,
)
from treespec.draft.drafter import Frontier
from treespec.draft.tree_assembly import Growing, Growth
from treespec.kernels import ops as kernels
from treespec.sampling.probs import SamplingParams, compute_probs, select_topk
from treespec.trees.tree import build_range


@dataclass
class Ranking:
    """The limits of a ranked tree.

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

    def count_expanded(self, level: int) -> int:
        """Returns the number of nodes of a level to expand, the best ones; 0 ends the tree. level: from 1."""
        if level >= self.depth:
            return 0
        if self.expanded is None:
            return self.topk
        return self.expanded

    def rank_children(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns [..., F, K] tokens and log-probabilities of the most likely children, the most likely first.

        logits: [..., F, V].
        """
        rows = logits
        if logits.shape[-2] > 1 and logits.stride(-2) == 0:  # one distribution for the whole level
            rows = logits[..., :1, :]
        topk = min(self.topk, logits.shape[-1])
        scores, tokens = select_topk(rows.log_softmax(-1, torch.float32), topk)
        return tokens.expand(logits.shape[:-1] + (topk,)), scores


@dataclass
class TopRanking(Ranking):
    """Grows one tree, or the trees of a batch together, on any device. A CUDA graph may record it."""

    def grow(self, root: Tensor, logits: Tensor) -> Growth:
        """Grows the tree.

        root: [1] int64. logits: [1, V] draft logits of its children. With [B, 1] and [B, 1, V] the
        trees of a batch grow together, and all that is yielded and returned is [B, ...].
        """
        level_tokens = [root]
        orders = list[Tensor]()
        scores = list[Tensor]()
        above = None
        for level in range(1, self.depth + 1):
            # 1. The most likely children of each frontier node are candidates.
            tokens, reach = self.rank_children(logits)  # [..., F, K]
            if above is not None:
                reach = above[..., None] + reach
            level_tokens.append(tokens.flatten(-2))
            scores.append(reach.flatten(-2))

            # 2. The best of them are the next frontier. If all of them are expanded, they keep their order.
            expanded = self.count_expanded(level)
            if not expanded:
                break
            above = scores[-1]
            frontier_tokens = level_tokens[-1]
            order = build_range(above.shape[-1], root.device).expand_as(frontier_tokens)
            if expanded < above.shape[-1]:
                above, best = above.sort(descending=True, stable=True)
                above = above[..., :expanded]
                order = best[..., :expanded]
                frontier_tokens = frontier_tokens.gather(-1, order)
            orders.append(order)
            frontier_logits = yield Frontier(frontier_tokens, order, tokens.shape[-1])
            logits = frontier_logits.unflatten(0, frontier_tokens.shape)

        # 3. Keep the best of all candidates.
        return select_best_tree(level_tokens, orders, scores, self.nodes)


def rank_most_likely(logits: Tensor, params: SamplingParams, k: int) -> tuple[Tensor, Tensor]:
    """Returns [F, K] probabilities of each row's most likely tokens, descending, and [F, K] int64 these tokens.

    logits: [F, V] on a CPU. params: at temperature 0 the probabilities are those at temperature 1.
    """
    temperature = params.temperature
    if params.greedy:
        temperature = 1.0
    is_cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    is_readable = logits.dtype in kernels.BFLOAT16_FLAGS and logits.is_contiguous()
    if is_readable and (params.greedy or not is_cut) and kernels.load_kernels():
        return kernels.rank_tokens(logits, k, temperature)
    if params.greedy:
        return select_topk(logits.float().softmax(-1), k)
    return select_topk(compute_probs(logits, params), k)


@dataclass(frozen=True)
class ScoredChildren:
    """The K most likely children of each of F nodes: those of the first node, then those of the next.

    Attributes:
        tokens: of the F K children, those of a node the most likely first.
        scores: the scores of their paths.
    """

    tokens: list[int]
    scores: list[float]


@dataclass
class HostRanking(Ranking):
    """Grows the tree of one sequence on a CPU, as `TopRanking` does."""

    def score_children(
        self, above: list[float] | None, logits: Tensor, depth: int
    ) -> ScoredChildren:
        """Scores the most likely children of F nodes.

        above: the scores of the nodes; None for the root. logits: [F, V]. depth: of the nodes.
        """
        tokens, scores = self.rank_children(logits)
        if above is not None:
            scores = torch.tensor(above, dtype=scores.dtype, device="cpu")[:, None] + scores
        return ScoredChildren(tokens.flatten().tolist(), scores.flatten().tolist())

    def choose_width(self, level: int, levels: list[CandidateLevel]) -> int:
        """Returns the number of nodes of a level to expand, the best ones; 0 ends the tree.

        level: from 1, the level of the nodes. levels: the candidates so far.
        """
        return self.count_expanded(level)

    def grow(self, root: Tensor, logits: Tensor) -> Growing[RankedTree]:
        """Grows the tree. root: [1] int64. logits: [1, V] draft logits of its children."""
        levels = list[CandidateLevel]()
        above = None
        frontier_columns = [0]
        first_column = 1  # of the present level
        for level in range(1, self.depth + 1):
            # 1. The most likely children of each frontier node are candidates.
            children = self.score_children(above, logits, level - 1)
            scores = children.scores
            topk = len(scores) // len(frontier_columns)
            parents = [column for column in frontier_columns for _ in range(topk)]
            levels.append(CandidateLevel(children.tokens, scores, parents))

            # 2. The best of them are the next frontier. If all of them are expanded, they keep their order.
            expanded = self.choose_width(level, levels)
            if not expanded:
                break
            order = list(range(len(scores)))
            if expanded < len(scores):
                order = rank_descending(scores)[:expanded]
            above = [scores[candidate] for candidate in order]
            frontier_columns = [first_column + candidate for candidate in order]
            first_column += len(scores)
            tokens = [children.tokens[candidate] for candidate in order]
            frontier = torch.tensor([tokens, order], dtype=torch.int64, device="cpu")
            logits = yield Frontier(frontier[0], frontier[1], topk)

        # 3. Keep the best of all candidates.
        return select_best_on_host(int(root), levels, self.nodes)

    def grow_tree(self, root: Tensor, logits: Tensor) -> Growth:
        """Grows the tree without its columns. root, logits: as in `grow`."""
        ranked = yield from self.grow(root, logits)
        return ranked.tree
