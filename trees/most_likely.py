"""Builds the tree of the most likely paths from a table of probabilities by depth and rank.

table[d][r] is the probability that the token d + 1 positions ahead is the draft's r-th most likely; d and r
count from 0. Medusa's trees take measured accuracies (Cai et al. 2024, 2401.10774, section 2.3.3), DDTree
takes the draft's probabilities. The probability of reaching a node is about the product along its path.
The tree of the most likely nodes has the largest sum of these products:

    table    .6 .2             root ─┬─ 0 .6 ─┬─ 0 .3
             .5 .2                   │        └─ 1 .12
                                     └─ 1 .2
    these five nodes yield 1 + .6 + .2 + .3 + .12 = 2.22 tokens a cycle
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from treespec.trees.shape import TreeError
from treespec.trees.static import StaticTree

Path = tuple[int, ...]


def build_most_likely_tree(table: Sequence[Sequence[float]], nodes: int) -> StaticTree:
    """Adds the most likely candidate to the tree until it has `nodes` nodes, root included.

    Candidates are the first children and the next siblings of the tree's nodes. Paths of probability 0 are
    never added. Of equally likely candidates the shallower one comes first.

    table: [D, R] probabilities. Raises TreeError if all are 0 or `nodes` is below 2.
    """
    paths: list[Path] = []
    candidates: list[tuple[float, int, Path, float]] = []  # -reach, depth, path, parent's reach

    def offer(parent: Path, rank: int, reach: float) -> None:
        """Make the parent's first child of this rank or later a candidate, if its probability is above 0."""
        depth = len(parent)
        if depth == len(table):
            return
        rates = table[depth]
        for child in range(rank, len(rates)):
            if reach * rates[child] > 0:
                entry = (-reach * rates[child], depth, parent + (child,), reach)
                heappush(candidates, entry)
                return

    offer((), 0, 1.0)
    while candidates and len(paths) < nodes - 1:
        negative_reach, _, path, parent_reach = heappop(candidates)
        paths.append(path)
        offer(path[:-1], path[-1] + 1, parent_reach)
        offer(path, 0, -negative_reach)
    if not paths:
        raise TreeError(
            "no tree can be measured: the head is never right, or nodes is below 2 (the root "
            "counts)"
        )
    return StaticTree(tuple(paths))


def estimate_length(tree: StaticTree, table: Sequence[Sequence[float]]) -> float:
    """Returns the expected tokens a cycle: 1 + the accepted ones, if depths are right independently.

    table: [D, R] probabilities.
    """
    reach: dict[Path, float] = {(): 1.0}
    for path in tree.paths[1:]:
        reach[path] = reach[path[:-1]] * table[len(path) - 1][path[-1]]
    return sum(reach.values())
