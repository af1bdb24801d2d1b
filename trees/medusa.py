"""A static tree from measured accuracies (Cai et al. 2024, 2401.10774, section 2.3.3).

accuracies[d, r] is the share of positions at which the token d + 1 places ahead is the draft's r-th
likeliest, both counted from 0. The chance to reach a node is about the product along its path. The
tree of the likeliest nodes has the largest sum of these products:

    accuracies    .6 .2             root ─┬─ 0 .6 ─┬─ 0 .3
                  .5 .2                   │        └─ 1 .12
                                          └─ 1 .2
    five nodes are worth 1 + .6 + .2 + .3 + .12 tokens a cycle
"""

from heapq import heappop, heappush
from typing import NamedTuple

from torch import Tensor

from treespec.trees.static import StaticTree, TreeError


class Candidate(NamedTuple):
    """A node that may join the tree; the smallest comes first.

    cost: -Pr(the node is reached). depth: of its parent. parent_reach: Pr(its parent is reached).
    """

    cost: float
    depth: int
    path: tuple[int, ...]
    parent_reach: float


def measured(accuracies: Tensor, nodes: int) -> StaticTree:
    """The tree that adds the likeliest candidate until it has `nodes` nodes, root included.

    Candidates are first children and next siblings of the nodes in the tree.
    accuracies: [D, R] probabilities.
    Raises TreeError where every accuracy is 0 or `nodes` is below 2.
    """
    table = accuracies.tolist()
    paths: list[tuple[int, ...]] = []
    candidates: list[Candidate] = []

    def offer(parent: tuple[int, ...], rank: int, parent_reach: float) -> None:
        """Add the parent's first child of this rank or later whose accuracy is above 0."""
        depth = len(parent)
        rates = table[depth] if depth < len(table) else []
        for child in range(rank, len(rates)):
            reach = parent_reach * rates[child]
            if reach > 0:
                heappush(candidates, Candidate(-reach, depth, (*parent, child), parent_reach))
                return

    # 1. The root's first child is the first candidate.
    offer((), 0, 1.0)

    # 2. Take the best candidate; its next sibling and its first child become candidates.
    while candidates and len(paths) < nodes - 1:
        best = heappop(candidates)
        paths.append(best.path)
        offer(best.path[:-1], best.path[-1] + 1, best.parent_reach)
        offer(best.path, 0, -best.cost)

    # 3. A tree of the root alone is none.
    if not paths:
        raise TreeError(
            "no tree can be measured: the head is never right, or nodes is below 2 (the root "
            "counts)"
        )
    return StaticTree(tuple(paths))


def expected_length(tree: StaticTree, accuracies: Tensor) -> float:
    """Tokens a cycle: 1 + the expected accepted ones, if depths are right independently.

    accuracies: [D, R] probabilities.
    """
    table = accuracies.tolist()
    reach: dict[tuple[int, ...], float] = {(): 1.0}
    for path in tree.paths[1:]:
        reach[path] = reach[path[:-1]] * table[len(path) - 1][path[-1]]
    return sum(reach.values())
