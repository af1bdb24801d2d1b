"""`Guess`: the draft of a drafter without a model, a tree of tokens whose root is added later."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from treespec.trees.tree import TokenTree

END_OF_TEXT = -1  # in arrays of tokens, after each of several sequences


@dataclass(frozen=True)
class Guess:
    """A tree of N - 1 draft tokens below the root, which is node 0. Parents come before their children.

    Attributes:
        tokens: the token of each node but the root.
        parents: the parent of each node but the root.
        probabilities: [N] Pr(a node is accepted | its parent is), 1 for the root; None: unknown.
        shares: for each node but the root, the fraction of its parent's continuations that go on to the node.
        length: tokens of the match that it continues.

    Four nodes with the tokens root a b c:

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
        """Builds a chain: each token is the child of the one before."""
        return cls(tokens, range(len(tokens)))

    def compute_reach(self, probabilities: np.ndarray) -> np.ndarray:
        """Returns [N] Pr(a node is accepted). probabilities: [N] Pr(a node is accepted | its parent is)."""
        reach = probabilities.tolist()
        for node, parent in enumerate(self.parents, start=1):
            reach[node] *= reach[parent]
        return np.array(reach)

    @property
    def score(self) -> float:
        """The expected number of accepted tokens; 0 without probabilities."""
        if self.probabilities is None:
            return 0.0
        return float(self.compute_reach(self.probabilities)[1:].sum())

    def keep_nodes(self, kept: np.ndarray) -> "Guess":
        """Returns the tree of some nodes. kept: [M] ascending, with the root, and with each node its parent."""
        nodes = kept.tolist()
        new_numbers = {node: number for number, node in enumerate(nodes)}
        parents = [new_numbers[self.parents[node - 1]] for node in nodes[1:]]
        tokens = [self.tokens[node - 1] for node in nodes[1:]]
        assert self.probabilities is not None
        return Guess(tokens, parents, self.probabilities[kept])

    def build_token_tree(self, root: int, device: "torch.device") -> "TokenTree":
        """Builds the token tree on a device, without draft distributions. root: the root's token."""
        from treespec.trees.mask import mark_ancestors  # checks before loading need no torch
        from treespec.trees.tree import TokenTree, to_device

        parents = [-1, *self.parents]
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        facts = to_device([[root, *self.tokens], parents, depths], device)
        return TokenTree(facts[0], facts[1], facts[2], to_device(mark_ancestors(parents), device))
