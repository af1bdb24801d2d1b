"""Trees that follow the draft or the clock: EAGLE-2's, DDTree's, and `auto`."""

from dataclasses import dataclass
from typing import ClassVar

from treespec.trees.most_likely import build_most_likely_tree
from treespec.trees.ranges import CHILDREN_RANGE, DEPTH_RANGE, NODES_RANGE, Range
from treespec.trees.shape import Builder, Growth, Policy


@dataclass(frozen=True)
class AutoTree(Policy):
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

    Its children are a function of the draft's scores. The number of draws at a node must not depend on
    the drawn tokens, so the tree does not take draws.

    The limits of the trees that the cost model may choose (`treespec.draft.auto.builder`):
    nodes: the largest N, root included.
    depth: the largest number of levels of drafted tokens.
    topk: the largest number of nodes expanded per level, and of children per node.
    """

    name = "auto"
    timed = True
    may_draw = False
    ranges: ClassVar = {"nodes": NODES_RANGE, "depth": DEPTH_RANGE, "topk": CHILDREN_RANGE}

    nodes: int = 64
    depth: int = 12
    topk: int = 10


@dataclass(frozen=True)
class DynamicTree(Policy):
    """EAGLE-2's dynamic tree (Li et al. 2024, 2406.16858): expand the most likely nodes, keep the best.

    It needs children that are a deterministic function of the text: a choice among sampled tokens by
    their own probability would bias the output.

    depth: levels of drafted tokens.
    topk: nodes expanded per level, and children per expanded node.
    nodes: N after the rerank, root included.
    """

    name = "dynamic"
    reranks = True
    repeats = True
    may_draw = False
    ranges: ClassVar = {"nodes": NODES_RANGE, "depth": DEPTH_RANGE, "topk": CHILDREN_RANGE}

    depth: int = 6
    topk: int = 10
    nodes: int = 60

    @property
    def max_draws(self) -> int:
        return self.topk

    def grow(self, build: Builder) -> Growth:
        return build.grow_ranked(self.depth, self.topk, self.nodes)


@dataclass(frozen=True)
class DDTree(Policy):
    """DDTree (2604.12989): the best tree of a size for a head that drafts all levels at once.

    The distribution of a level depends on the text alone. So the probability of a path is the product of
    one probability a level, and the tree of the most likely paths is known once the head has run
    (`treespec.trees.most likely`):

        level 1    a .6  b .3      paths    a .6   ac .42   b .3   bc .21   ad .12   …
        level 2    c .7  d .2      tree of five nodes:   root ─┬─ a ── c
                                                               └─ b ── c

    Sampled children make a tree of the same shape: it is fixed by the levels' distributions before
    anything is drawn. There a child of rank r is the r-th draw.

    nodes: N, root included. depth: levels of drafted tokens, as far as the head drafts them.
    """

    name = "ddtree"
    reranks = True
    at_once = True
    # A ranked tree has 256 children at most.
    ranges: ClassVar = {"nodes": Range(least=2, most=257, whole=True), "depth": DEPTH_RANGE}

    nodes: int = 60
    depth: int = 16

    def grow(self, build: Builder) -> Growth:
        levels = yield from build.predict_levels(self.depth, self.nodes - 1)
        if not build.one_hot:
            return (
                yield from build.grow_fixed(build_most_likely_tree(levels.tolist(), self.nodes))
            )
        # No path below a node that a level of nodes - 1 leaves out is among the most likely of all.
        return (yield from build.grow_ranked(len(levels), self.nodes - 1, self.nodes))
