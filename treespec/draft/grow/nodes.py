"""The nodes of a tree that grows level by level.

They lie on the host, so that the device never waits for the tree's shape.
"""

from typing import final

import numpy as np
import torch
from torch import Tensor

from treespec.draft.proposer import Frontier
from treespec.trees.tree import Drafts, TokenTree


@final
class Nodes:
    """A growing tree. Nodes are numbered in the order in which they are added; the root is 0.

    Two levels added to a root, `add([a, b], [0, 0])` and `add([c, d], [1, 2])`:

        0 ─┬─ 1 ─── 3      tokens     root  a b  c d
           └─ 2 ─── 4      parents    -1    0 0  1 2
                           depths     0     1 1  2 2
    """

    def __init__(self, root: Tensor) -> None:
        """root: [1] int64, on the device that the tree is for."""
        self.root, self.count = root, 1
        self.tokens = [np.zeros(0, dtype=np.int64)]  # without the root
        self.parents, self.depths = [np.array([-1])], [np.zeros(1, dtype=np.int64)]

    def add(self, tokens: np.ndarray, parents: np.ndarray) -> None:
        """Add a level. tokens: [M] int64. parents: [M] int64, the numbers of their parents."""
        self.depths.append(np.full(len(tokens), len(self.depths)))
        self.tokens.append(tokens)
        self.parents.append(parents)
        self.count += len(tokens)

    def frontier(self, places: np.ndarray, rows: np.ndarray) -> Frontier:
        """F nodes of the last level.

        places: [F] their places in the level. rows: [F] the rows of their parents in the frontier
        above.
        """
        return Frontier(self._on_device(self.tokens[-1][places]), self._on_device(rows))

    def tree(self, kept: np.ndarray | None = None, drafts: Drafts | None = None) -> TokenTree:
        """The nodes as a token tree.

        kept: [N] numbers of the nodes to keep, parents before children, first the root's 0.
        Default: all nodes.
        """
        # 1. Join the levels, and renumber what is kept.
        tokens, parents, depths = (
            np.concatenate(levels) for levels in (self.tokens, self.parents, self.depths)
        )
        if kept is not None:
            number = np.zeros(self.count, dtype=np.int64)
            number[kept] = np.arange(len(kept))
            tokens, parents, depths = tokens[kept[1:] - 1], number[parents[kept]], depths[kept]
            parents[0] = -1

        # 2. A node's ancestors are its parent's ancestors and itself.
        above = np.eye(len(parents), dtype=bool)
        for depth in range(1, int(depths.max()) + 1):
            (level,) = np.nonzero(depths == depth)
            above[level] |= above[parents[level]]

        # 3. Copy the tree to the device.
        all_tokens = torch.cat([self.root, self._on_device(tokens)])
        links, levels = self._on_device(parents), self._on_device(depths)
        return TokenTree(all_tokens, links, levels, self._on_device(above), drafts)

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.root.device)
