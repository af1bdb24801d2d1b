"""EAGLE-2's dynamic tree (Li et al. 2024, 2406.16858): expand the likeliest nodes, keep the best.

It needs children that are a deterministic function of the text. A choice among sampled tokens by
their own probability would bias the output; `treespec.draft.grow.dynamic` refuses that.
"""

from dataclasses import dataclass
from typing import ClassVar

from treespec.trees.ranges import CHILDREN, DEPTH, NODES, outside
from treespec.trees.shape import Policy
from treespec.trees.static import TreeError


@dataclass(frozen=True)
class DynamicTree(Policy):
    """The numbers of the tree.

    depth: levels of drafted tokens.
    topk: nodes expanded per level, and children per expanded node.
    nodes: N after the rerank, root included.
    """

    name: ClassVar[str] = "dynamic"
    reranks: ClassVar[bool] = True

    depth: int = 6
    topk: int = 10
    nodes: int = 60

    def __post_init__(self) -> None:
        if wrong := outside(self, nodes=NODES, depth=DEPTH, topk=CHILDREN):
            raise TreeError(f"dynamic tree: {wrong}")

    @property
    def max_depth(self) -> int:
        return self.depth
