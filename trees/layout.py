"""Turns a static tree into tensors, so that it can be grown level by level."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor

from treespec.trees.mask import build_ancestor_mask
from treespec.trees.static import StaticTree
from treespec.trees.tree import to_device

TreePath: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Level:
    """The frontier of one depth: F inner nodes and their C children.

    Attributes:
        nodes: [F] int64 node numbers.
        parent_rows: [F] int64, the row of each node's parent in the frontier above.
        draws: [F] int64, the number of draws at each node, on the host.
        first: the node number of the first child. The children have the numbers first to first + C - 1.
        rows, columns: [C] int64, row and column of each child's draw in a table [F, K] of draws.
    """

    nodes: Tensor
    parent_rows: Tensor
    draws: Tensor
    first: int
    rows: Tensor
    columns: Tensor


@dataclass(frozen=True)
class Layout:
    """The tensors of a static tree with N nodes.

    Attributes:
        parents: [N] int64, the parent of each node; -1 for the root.
        depth: [N] int64, the depth of each node.
        ancestors: [N, N] bool; row i marks node i and its ancestors.
        levels: the frontier of each depth, the root's first.
    """

    parents: Tensor
    depth: Tensor
    ancestors: Tensor
    levels: tuple[Level, ...]


@lru_cache
def get_layout(tree: StaticTree, device: torch.device) -> Layout:
    """Returns the tree's tensors on a device; they are built once for each tree and device.

    Nodes are numbered level by level, and the children of a node in draw order. In the tree of the paths
    (0,), (2,), (0, 0) and (2, 1), draw 1 at the root and draw 0 at node 2 have no node:

        0 ─┬─ draw 0: 1 ──── draw 0: 3       level 0   nodes 0     draws 3      first 1
           ├─ draw 1                                   rows 0 0    columns 0 2
           └─ draw 2: 2 ─┬─ draw 0           level 1   nodes 1 2   draws 1 2    first 3
                         └─ draw 1: 4                  rows 0 1    columns 0 1  parent_rows 0 0
    """
    node_of = {path: node for node, path in enumerate(tree.paths)}

    # 1. The frontier of each depth: its inner nodes, and the draw of each child.
    levels = []
    row_above: dict[TreePath, int] = {}  # the row of each node in the frontier above
    for _, paths in groupby(tree.paths[1:], len):
        children = list(paths)
        row_of = number_parents(children)
        levels.append(
            Level(
                nodes=to_device([node_of[path] for path in row_of], device),
                parent_rows=to_device([row_above.get(path[:-1], 0) for path in row_of], device),
                draws=torch.tensor(
                    [tree.count_draws(path) for path in row_of], dtype=torch.int64, device="cpu"
                ),
                first=node_of[children[0]],
                rows=to_device([row_of[path[:-1]] for path in children], device),
                columns=to_device([path[-1] for path in children], device),
            )
        )
        row_above = row_of

    # 2. Parents, depths and ancestors of all nodes.
    parents = to_device([-1] + [node_of[path[:-1]] for path in tree.paths[1:]], device)
    depths = to_device(list(map(len, tree.paths)), device)
    return Layout(parents, depths, build_ancestor_mask(parents), tuple(levels))


def number_parents(children: list[TreePath]) -> dict[TreePath, int]:
    """Maps the path of each parent of these children to its row in the frontier, in the children's order."""
    row_of: dict[TreePath, int] = {}
    for path in children:
        row_of.setdefault(path[:-1], len(row_of))
    return row_of
