"""EAGLE-2's dynamic tree (Li et al. 2024, 2406.16858): expand the likeliest nodes, rerank, keep the
best.

Only for children that are a deterministic function of the text: ranking sampled tokens by their own
probability would bias the output (`treespec.draft.grow.dynamic` refuses it).
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
    """depth: levels of drafted tokens. topk: nodes expanded per level, and children per node.

    nodes: N, root included.
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
    """[min(count, M)] numbers of the best candidates, best first; ties go to the earlier, shallower
    one.
    """
    return scores.sort(descending=True, stable=True).indices[:count]


def connect(kept: Tensor, parents: Tensor) -> Tensor:
    """Renumber a kept part of a candidate tree.

    kept: [N] ascending candidate numbers, the root's 0 first, closed under parents. parents: [M]
    candidate numbers. Returns parents [N] in the new numbers, -1 for the root.
    """
    number = torch.full_like(parents, -1)
    number[kept] = torch.arange(len(kept), device=kept.device)
    result = number[parents[kept]]
    result[0] = -1
    return result
