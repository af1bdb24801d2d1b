"""A tree as large as pays on this machine: each node and each level must earn its time.

Let the text run at R tokens a second so far. A tree that takes C seconds and yields E expected
tokens is best where E - R C is largest; the ratio of all tokens to all seconds is then largest too
(Dinkelbach 1967). So node n + 1 pays while Pr(it is reached) > R (T(n + 1) - T(n)), T(n) the
seconds of a target forward over n nodes. A level pays while it adds more tokens than R times the
seconds of a draft step.

    nodes n                       1   2   3   4   5   6
    reach of the n-th best        1   .7  .5  .3  .2  .1
    R T(n)                        1   1.1 1.2 1.5 2.0 2.5
    E - R T(n)                    0   .6  1.0 1.0 .7  .3      take three nodes

That holds for the likeliest tokens. The number of draws at a node must not depend on the drawn
tokens. So for sampled children the tree is one of Sequoia's: the one with most tokens a second by
the acceptance rates so far.
"""

from dataclasses import dataclass
from typing import ClassVar

from treespec.trees.ranges import CHILDREN, DEPTH, NODES
from treespec.trees.shape import Policy


@dataclass(frozen=True)
class AutoTree(Policy):
    """Limits of the trees that the cost model may choose (`treespec.draft.grow.auto`).

    nodes: the largest N, root included.
    depth: the largest number of levels of drafted tokens.
    topk: where children are the likeliest tokens, the largest number of nodes expanded per level,
    and of children per node.
    """

    name, timed = "auto", True
    ranges: ClassVar = {"nodes": NODES, "depth": DEPTH, "topk": CHILDREN}

    nodes: int = 64
    depth: int = 12
    topk: int = 10
