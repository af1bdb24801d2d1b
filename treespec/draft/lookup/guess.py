"""What a drafter without a model hands over: draft tokens as a tree, before the root is known."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from treespec.trees.tree import TokenTree

END_OF_TEXT = -1  # in arrays of tokens, after each of several texts


@dataclass(frozen=True)
class Guess:
    """N - 1 draft tokens below the root, which is node 0. Parents come first.

    tokens, parents: of each node but the root. probabilities: [N] Pr(a node is accepted | its parent
    is); None: nobody knows. shares: of the places that reach a node's parent, those that reach the
    node, too. length: tokens of the match that it continues.

        root ─┬─ a ─── c        tokens   a b c
              └─ b              parents  0 0 1
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    probabilities: np.ndarray | None = None
    shares: Sequence[float] = ()
    length: int = 0

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> "Guess":
        """Each token follows the one before."""
        return cls(tokens, range(len(tokens)))

    def compute_reach(self, probabilities: np.ndarray) -> np.ndarray:
        """[N] Pr(a node is reached), of Pr(it is accepted | its parent is)."""
        reach = probabilities.copy()
        for node, parent in enumerate(self.parents, start=1):
            reach[node] *= reach[parent]
        return reach

    @property
    def score(self) -> float:
        """Expected accepted tokens."""
        if self.probabilities is None:
            return 0.0
        return float(self.compute_reach(self.probabilities)[1:].sum())

    def keep_nodes(self, kept: np.ndarray) -> "Guess":
        """The tree of some nodes. kept: [M] ascending numbers, first the root's 0; with a node its parent is kept."""
        number = {node: new for new, node in enumerate(kept.tolist())}
        parents = [number[self.parents[node - 1]] for node in kept[1:]]
        tokens = [self.tokens[node - 1] for node in kept[1:]]
        assert self.probabilities is not None
        return Guess(tokens, parents, self.probabilities[kept])

    def build_token_tree(self, root: int, device: "torch.device") -> "TokenTree":
        """The tree on a device, without draft distributions. root: its token."""
        from treespec.trees.tree import TokenTree, to_device  # checks before loading need no torch

        ancestors = np.eye(1 + len(self.tokens), dtype=bool)
        for node, parent in enumerate(self.parents, start=1):
            ancestors[node] |= ancestors[parent]
        seen = to_device(ancestors, device)
        tokens, parents = to_device([[root, *self.tokens], [-1, *self.parents]], device)
        return TokenTree(tokens, parents, seen.sum(1) - 1, seen)
