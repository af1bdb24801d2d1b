"""The nodes of a tree that grows level by level, kept on the host so that no device waits for its
shape.
"""

from typing import final

import numpy as np
import torch
from torch import Tensor

from treespec.draft.proposer import Frontier
from treespec.trees.tree import Drafts, TokenTree


@final
class Nodes:
    """Numbered in the order in which they are added, the root being 0."""

    def __init__(self, root: Tensor) -> None:
        """root: [1] int64, on the device that the tree is for."""
        self.root, self.count = root, 1
        self.tokens = [np.zeros(0, dtype=np.int64)]  # without the root
        self.parents, self.depths = [np.array([-1])], [np.zeros(1, dtype=np.int64)]

    def add(self, tokens: np.ndarray, parents: np.ndarray) -> None:
        """One more level. tokens: [M] int64. parents: [M] their numbers."""
        self.depths.append(np.full(len(tokens), len(self.depths)))
        self.tokens.append(tokens)
        self.parents.append(parents)
        self.count += len(tokens)

    def frontier(self, places: np.ndarray, rows: np.ndarray) -> Frontier:
        """Nodes [F] of the last level, by their place in it, and the rows of their parents in the
        frontier above.
        """
        return Frontier(self._given(self.tokens[-1][places]), self._given(rows))

    def tree(self, kept: np.ndarray | None = None, drafts: Drafts | None = None) -> TokenTree:
        """kept: [N] numbers of the nodes to keep, parents before children, the root's 0 first; None
        is all.
        """
        tokens, parents, depths = (
            np.concatenate(x) for x in (self.tokens, self.parents, self.depths)
        )
        if kept is not None:
            number = np.zeros(self.count, dtype=np.int64)
            number[kept] = np.arange(len(kept))
            tokens, parents, depths = tokens[kept[1:] - 1], number[parents[kept]], depths[kept]
            parents[0] = -1
        above = np.eye(len(parents), dtype=bool)
        for depth in range(1, int(depths.max()) + 1):
            (level,) = np.nonzero(depths == depth)
            above[level] |= above[parents[level]]
        everything = torch.cat([self.root, self._given(tokens)])
        return TokenTree(
            everything, self._given(parents), self._given(depths), self._given(above), drafts
        )

    def _given(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(x).to(self.root.device)
