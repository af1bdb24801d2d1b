"""A tree as large as it pays on a machine: nodes and levels are taken while they bring more than
they cost.

With R tokens a second so far, a tree that takes C seconds and is expected to bring E tokens is best
where E - R C is largest (Dinkelbach 1967: the ratio of sums is then largest too). So a node is
worth its place while it is reached with more than R (T(n + 1) - T(n)), and a level while it brings
more than R times the head's step.

    reach of nodes, best first    1  .7  .5  .3  .2  .1
    R T(n), n = 1 .. 6            1  1.1 1.2 1.5 2.0 2.5     E - R T   0  .6  1.0  1.0  .7  .3     three nodes

That holds for the likeliest tokens. The number of draws at a node must not depend on the drawn
tokens, so for sampled children the tree is one of Sequoia's: the one with most tokens a second by
the acceptance rates so far.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from treespec.trees.ranges import CHILDREN, DEPTH, NODES, outside
from treespec.trees.shape import Policy
from treespec.trees.static import TreeError


@dataclass(frozen=True)
class AutoTree(Policy):
    """nodes: limit on N, root included. depth: limit on levels of drafted tokens.

    topk: limit on the nodes expanded per level and on their children, where the likeliest tokens
    are taken.
    """

    name: ClassVar[str] = "auto"
    timed: ClassVar[bool] = True

    nodes: int = 64
    depth: int = 12
    topk: int = 10

    def __post_init__(self) -> None:
        if wrong := outside(self, nodes=NODES, depth=DEPTH, topk=CHILDREN):
            raise TreeError(f"auto tree: {wrong}")

    @property
    def max_depth(self) -> int:
        return self.depth


def best_size(reach: np.ndarray, forward: np.ndarray, rate: float) -> tuple[int, float]:
    """The number of nodes, root included, with the largest worth E - R T, and that worth in tokens.

    reach: [M] Pr(a node is on the accepted path), without the root, descending. forward: [M + 1] or
    more, seconds of the target's forward over 1, 2, … nodes. rate: R, tokens a second.
    """
    expected = np.ones(len(reach) + 1)
    expected[1:] += reach.cumsum()
    worth = expected[: len(forward)] - rate * forward[: len(expected)]
    best = int(worth.argmax())
    return best + 1, float(worth[best])
