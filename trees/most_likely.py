"""The tree of the most likely paths, by a table of probabilities by depth and rank.

table[d][r] is the probability that the token d + 1 places ahead is the draft's r-th most likely, both
counted from 0: measured accuracies for Medusa's trees (Cai et al. 2024, 2401.10774, section 2.3.3),
or the draft's own probabilities for DDTree. The probability to reach a node is about the product
along its path. The tree of the most likely nodes has the largest sum of these products:

    table    .6 .2             root ─┬─ 0 .6 ─┬─ 0 .3
             .5 .2                   │        └─ 1 .12
                                     └─ 1 .2
    five nodes are worth 1 + .6 + .2 + .3 + .12 tokens a cycle
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from treespec.trees.shape import TreeError
from treespec.trees.static import StaticTree

Path = tuple[int, ...]


def build_most_likely_tree(table: Sequence[Sequence[float]], nodes: int) -> StaticTree:
    """The tree that adds the most likely candidate until it has `nodes` nodes, root included.

    Candidates are first children and next siblings of the nodes in the tree. A path of probability 0
    is none. Of equal ones the shallower comes first.
    table: [D, R] probabilities. Raises TreeError where all are 0 or `nodes` is below 2.
    """
    paths: list[Path] = []
    candidates: list[tuple[float, int, Path, float]] = []  # -reach, depth, path, parent's reach

    def offer(parent: Path, rank: int, reach: float) -> None:
        """Add the parent's first child of this rank or later whose probability is above 0."""
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
        cost, _, path, above = heappop(candidates)
        paths.append(path)
        offer(path[:-1], path[-1] + 1, above)
        offer(path, 0, -cost)
    if not paths:
        raise TreeError(
            "no tree can be measured: the head is never right, or nodes is below 2 (the root "
            "counts)"
        )
    return StaticTree(tuple(paths))


def estimate_length(tree: StaticTree, table: Sequence[Sequence[float]]) -> float:
    """Tokens a cycle: 1 + the expected accepted ones, if depths are right independently.

    table: [D, R] probabilities.
    """
    reach: dict[Path, float] = {(): 1.0}
    for path in tree.paths[1:]:
        reach[path] = reach[path[:-1]] * table[len(path) - 1][path[-1]]
    return sum(reach.values())
