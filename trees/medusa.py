"""A static tree from measured accuracies (Cai et al. 2024, 2401.10774, section 2.3.3): the
likeliest nodes.

accuracies[d, r]: the share of positions at which the token d + 1 places ahead is the draft's r-th
likeliest, both from 0. A node is reached with about the product along its path, and what a tree is
worth is the sum over its nodes:

    accuracies    .6 .2             root ─┬─ 0 .6 ─┬─ 0 .3         five nodes are worth 1 + .6 + .2 + .3 + .12
                  .5 .2                   │        └─ 1 .12
                                          └─ 1 .2
"""

from heapq import heappop, heappush

from torch import Tensor

from treespec.trees.static import StaticTree, TreeError


def measured(accuracies: Tensor, nodes: int) -> StaticTree:
    """The tree that adds the best candidate node until it has `nodes` nodes, root included.

    Candidates are first children and next siblings of the nodes that are there.
    accuracies: [D, R]. Raises TreeError where every accuracy is 0 or `nodes` is below 2.
    """
    table = accuracies.tolist()
    paths: list[tuple[int, ...]] = []
    waiting: list[
        tuple[float, int, tuple[int, ...], float]
    ] = []  # -worth, depth, path, worth of the parent

    def offer(parent: tuple[int, ...], rank: int, above: float) -> None:
        """Add the parent's first child of this rank or later whose accuracy is above 0."""
        rates = table[len(parent)] if len(parent) < len(table) else []
        found = next((r for r in range(rank, len(rates)) if above * rates[r] > 0), None)
        if found is not None:
            heappush(waiting, (-above * rates[found], len(parent), (*parent, found), above))

    offer((), 0, 1.0)
    while waiting and len(paths) < nodes - 1:
        worth, _, path, above = heappop(waiting)
        paths.append(path)
        offer(path[:-1], path[-1] + 1, above)
        offer(path, 0, -worth)
    if not paths:
        raise TreeError(
            "no tree can be measured: the head is never right, or nodes is below 2 (the root counts)"
        )
    return StaticTree(tuple(paths))


def expected_length(tree: StaticTree, accuracies: Tensor) -> float:
    """Tokens a cycle, 1 + the accepted ones, where every depth is right or wrong by itself.

    accuracies: [D, R].
    """
    table = accuracies.tolist()
    reach: dict[tuple[int, ...], float] = {(): 1.0}
    for path in tree.paths[1:]:
        reach[path] = reach[path[:-1]] * table[len(path) - 1][path[-1]]
    return sum(reach.values())
