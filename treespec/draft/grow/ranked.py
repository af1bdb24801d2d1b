"""Growing a tree of the most likely tokens, a level at a time: EAGLE-2's, and those chosen by their cost."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from treespec.draft.grow.growth import Growing, Nodes
from treespec.shaping.sampling import largest
from treespec.trees.tree import TokenTree, best_first


class Ranking(Protocol):
    """Which nodes are expanded, and which are kept.

    depth: levels, at most. nodes: N to keep, the root included, once the last level is there.
    Scores are those of paths; no child's is above its parent's.
    """

    @property
    def depth(self) -> int: ...

    @property
    def nodes(self) -> int: ...

    def below(self, above: Tensor | None, logits: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """[F, K] tokens and [F, K] scores of the most likely children of F nodes, the likeliest first.

        above: [F] scores of the nodes; None for the root. logits: [F, V]. depth: of the nodes.
        """
        ...

    def width(self, level: int, scores: list[Tensor]) -> int:
        """How many of the best nodes of a level to expand; 0 ends the tree. scores: of all levels."""
        ...


@dataclass(frozen=True)
class Ranked:
    """EAGLE-2's ranking by log-probability (`treespec.trees.dynamic`).

    topk: children per node. expanded: nodes per level; None: topk of them.
    """

    depth: int
    topk: int
    nodes: int
    expanded: int | None = None

    def below(self, above: Tensor | None, logits: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        shared = len(logits) > 1 and logits.stride(0) == 0  # one distribution for the whole level
        law = (logits[:1] if shared else logits).float().log_softmax(-1)
        best, tokens = largest(law, min(self.topk, law.shape[-1]))
        return tokens.expand(len(logits), -1), best if above is None else above[:, None] + best

    def width(self, level: int, scores: list[Tensor]) -> int:
        return (self.expanded or self.topk) if level < self.depth else 0


def grow_ranked(root: Tensor, logits: Tensor, by: Ranking) -> Growing[tuple[TokenTree, Tensor]]:
    """The growth of the tree, and the candidates [N] that it keeps, the root's 0 first.

    Candidates are numbered level by level. The kept ones stand best first, so that a likely path lies
    where `commit` leaves it. Of equals the parent comes first, so with a node its parent is kept.
    root: [1] int64. logits: [1, V] draft logits of its children.
    """
    nodes, scores = Nodes(root), list[Tensor]()
    frontier, above = root.new_zeros(1), None
    for level in range(1, by.depth + 1):
        # 1. The most likely children of each frontier node are candidates.
        tokens, reach = by.below(above, logits, level - 1)  # [F, K]
        first, width = nodes.count, tokens.shape[1]
        nodes.add(tokens.flatten(), frontier.repeat_interleave(width))
        scores.append(reach.flatten())

        # 2. The best of them are the next frontier.
        expanded = by.width(level, scores)
        if not expanded:
            break
        best = best_first(scores[-1], expanded)
        frontier, above = first + best, scores[-1][best]
        logits = yield nodes.frontier(best, best // width)

    # 3. Keep the best of all candidates.
    kept = 1 + best_first(torch.cat(scores), by.nodes - 1)
    kept = torch.cat([kept.new_zeros(1), kept])
    return nodes.tree(kept), kept
