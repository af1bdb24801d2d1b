"""EAGLE-2's dynamic tree (Li et al. 2024, 2406.16858): expand the likeliest nodes, keep the best.

It needs children that are a deterministic function of the text. A choice among sampled tokens by
their own probability would bias the output; `treespec.draft.grow.dynamic` refuses that.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

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


def best_first(scores: Tensor, count: int) -> Tensor:
    """[min(count, M)] numbers of the best candidates, best first. scores: [M].

    Of equal scores the earlier candidate wins, which is the shallower one.
    """
    return scores.sort(descending=True, stable=True).indices[:count]


def connect(kept: Tensor, parents: Tensor) -> Tensor:
    """[N] int64 the parents of the kept candidates, in their new numbers; -1 for the root.

    Five of seven candidates, those in brackets. They get the numbers 0 to 4 in their order:

             [0]              candidate   0  1  2  3  4  5  6        new number   0  1  2  3  4
           /  |  \\            parent      0  0  0  0  1  1  3        kept         0  1  3  5  6
        [1]   2   [3]                                                parents     -1  0  0  1  2
        / \\        |
       4   [5]    [6]

    kept: [N] ascending candidate numbers, first the root's 0; with a node its parent is kept.
    parents: [M] candidate numbers.
    """
    number = torch.full_like(parents, -1)
    number[kept] = torch.arange(len(kept), device=kept.device)
    result = number[parents[kept]]
    result[0] = -1
    return result
