"""DDTree (2604.12989): the best tree of a size for a head that drafts all levels at once.

The law of a level depends on the text alone. So the probability of a path is the product of one
probability a level, and the tree of the likeliest paths is known once the head has run:

    level 1    a .6  b .3      paths    a .6   ac .42   b .3   bc .21   ad .12   …
    level 2    c .7  d .2      tree of five nodes:   root ─┬─ a ── c
                                                           └─ b ── c

Sampled children make a tree of the same shape: it is settled by the levels' laws before anything is
drawn. There a child of rank r is the r-th draw.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import ClassVar

import numpy as np

from treespec.trees.ranges import DEPTH, Range, outside
from treespec.trees.shape import Policy
from treespec.trees.static import StaticTree, TreeError


@dataclass(frozen=True)
class DDTree(Policy):
    """nodes: N, root included. depth: levels of drafted tokens, as far as the head drafts them."""

    name: ClassVar[str] = "ddtree"
    reranks: ClassVar[bool] = True

    nodes: int = 60
    depth: int = 16

    def __post_init__(self) -> None:
        nodes = Range(least=2, most=257, whole=True)  # a dynamic tree has 256 children at most
        if wrong := outside(self, nodes=nodes, depth=DEPTH):
            raise TreeError(f"ddtree: {wrong}")

    @property
    def max_depth(self) -> int:
        return self.depth


def likeliest_shape(chances: np.ndarray, nodes: int) -> StaticTree:
    """The tree of the likeliest paths by rank, of `nodes` nodes, or of fewer if there are fewer paths.

    chances: [D, R] the probabilities of each level's likeliest tokens, descending. A path is worth
    the product of its levels'; of equal ones the shorter comes first. One with a token of
    probability 0, which no draw gives, is left out.
    """
    depth, ranks = chances.shape
    paths: list[tuple[int, ...]] = []
    # (-product, length, path)
    waiting: list[tuple[float, int, tuple[int, ...]]] = [(-float(chances[0, 0]), 1, (0,))]
    while waiting and len(paths) < nodes - 1:
        product, length, path = heappop(waiting)
        paths.append(path)
        last = path[-1]
        if last + 1 < ranks and chances[length - 1, last + 1] > 0:
            beside = product / chances[length - 1, last] * chances[length - 1, last + 1]
            heappush(waiting, (float(beside), length, (*path[:-1], last + 1)))
        if length < depth:
            below = product * float(chances[length, 0])
            heappush(waiting, (below, length + 1, (*path, 0)))
    return StaticTree(tuple(paths))
