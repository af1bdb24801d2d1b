"""Trees whose shape depends on the draft or on measured times: EAGLE-2's, DDTree's, and `auto`."""

from dataclasses import dataclass
from typing import ClassVar

from treespec.trees.most_likely import build_most_likely_tree
from treespec.trees.ranges import CHILDREN_RANGE, DEPTH_RANGE, NODES_RANGE, Range
from treespec.trees.shape import Builder, Growth, Policy


@dataclass(frozen=True)
class AutoTree(Policy):
    """Chooses the tree with the most tokens per second: each node and each level must be worth its time.

    Let the sequence run at R tokens per second so far, and let a tree take C seconds and yield E expected
    tokens. The best tree has the largest E - R C; it also has the largest ratio of tokens to seconds
    (Dinkelbach 1967). T(n) are the seconds of a target forward over n nodes. Node n + 1 is worth adding
    while Pr(it is reached) > R (T(n + 1) - T(n)). A level is worth adding while it brings more tokens than
    R times the seconds of a draft step.

        nodes n                       1   2   3   4   5   6
        reach of the n-th best        1   .7  .5  .3  .2  .1
        R T(n)                        1   1.1 1.2 1.5 2.0 2.5
        E - R T(n)                    0   .6  1.0 1.0 .7  .3      take three nodes

    The children are the most likely tokens, never draws: the number of draws at a node must not depend on
    the drawn tokens.

    Attributes:
        nodes: the largest N that the cost model (`treespec.draft.auto.builder`) may choose, root included.
        depth: the largest number of levels of draft tokens.
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
    """EAGLE-2's dynamic tree (Li et al. 2024, 2406.16858): expands the most likely nodes, keeps the best.

    Its children must be a deterministic function of the sequence. Choosing among sampled tokens by their
    probability would bias the output.

    Attributes:
        depth: levels of draft tokens.
        topk: nodes expanded per level, and children per expanded node.
        nodes: N after the reranking, root included.
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
    """DDTree (2604.12989): the best tree of a size for a head that drafts all levels in one forward.

    The distribution of a level depends only on the sequence, not on the tokens drafted above. So the
    probability of a path is a product of one probability per level, and the tree of the most likely paths is
    known as soon as the head has run (`treespec.trees.most_likely`):

        level 1    a .6  b .3      paths    a .6   ac .42   b .3   bc .21   ad .12   …
        level 2    c .7  d .2      tree of five nodes:   root ─┬─ a ── c
                                                               └─ b ── c

    With sampled children the tree has the same shape, which the levels' distributions fix before anything
    is drawn. A child of rank r is then the r-th draw.

    Where a level also depends on the tokens above (DSpark), the most likely children come from each node's own
    distribution. With sampled children the shape follows the levels below the chain of most likely tokens.

    Attributes:
        nodes: N, root included.
        depth: the largest number of levels of draft tokens; a head may draft fewer.
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
        # nodes - 1 nodes a level suffice: a path through any other node is not among the nodes - 1 best.
        return (yield from build.grow_ranked(len(levels), self.nodes - 1, self.nodes))
