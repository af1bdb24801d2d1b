"""DDTree (2604.12989): the best tree of a size for a head that drafts all levels at once.

The distribution of a level depends on the text alone. So the probability of a path is the product of
one probability a level, and the tree of the likeliest paths is known once the head has run
(`treespec.trees.likeliest`):

    level 1    a .6  b .3      paths    a .6   ac .42   b .3   bc .21   ad .12   …
    level 2    c .7  d .2      tree of five nodes:   root ─┬─ a ── c
                                                           └─ b ── c

Sampled children make a tree of the same shape: it is fixed by the levels' distributions before
anything is drawn. There a child of rank r is the r-th draw.
"""

from dataclasses import dataclass
from typing import ClassVar

from treespec.trees.likeliest import likeliest
from treespec.trees.ranges import DEPTH, Range
from treespec.trees.shape import Builder, Growth, Policy


@dataclass(frozen=True)
class DDTree(Policy):
    """nodes: N, root included. depth: levels of drafted tokens, as far as the head drafts them."""

    name, reranks, at_once = "ddtree", True, True
    # A ranked tree has 256 children at most.
    ranges: ClassVar = {"nodes": Range(least=2, most=257, whole=True), "depth": DEPTH}

    nodes: int = 60
    depth: int = 16

    def grow(self, build: Builder, known: None) -> Growth:
        levels = build.levels(self.depth, self.nodes - 1)
        if not build.one_hot:
            return build.fixed(likeliest(levels.tolist(), self.nodes))
        # No path below a node that a level of nodes - 1 leaves out is among the likeliest of all.
        return build.ranked(len(levels), self.nodes - 1, self.nodes)
