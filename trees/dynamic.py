"""EAGLE-2's dynamic tree (Li et al. 2024, 2406.16858): expand the likeliest nodes, keep the best.

It needs children that are a deterministic function of the text: a choice among sampled tokens by
their own probability would bias the output.
"""

from dataclasses import dataclass
from typing import ClassVar

from treespec.trees.ranges import CHILDREN, DEPTH, NODES
from treespec.trees.shape import Builder, Growth, Policy


@dataclass(frozen=True)
class DynamicTree(Policy):
    """The numbers of the tree.

    depth: levels of drafted tokens.
    topk: nodes expanded per level, and children per expanded node.
    nodes: N after the rerank, root included.
    """

    name, reranks, may_draw = "dynamic", True, False
    ranges: ClassVar = {"nodes": NODES, "depth": DEPTH, "topk": CHILDREN}

    depth: int = 6
    topk: int = 10
    nodes: int = 60

    @property
    def max_draws(self) -> int:
        return self.topk

    def grow(self, build: Builder, known: None) -> Growth:
        return build.ranked(self.depth, self.topk, self.nodes)
