"""REST (He et al. 2024, 2311.08252): what followed the text's last tokens in a datastore, merged into a tree."""

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import torch

from treespec.datastore import ORDER, Datastore
from treespec.draft.trie import trie
from treespec.errors import InputError
from treespec.options import bounded
from treespec.target import TreeOutput
from treespec.trees.tree import TokenTree


@dataclass(frozen=True)
class RestOptions:
    """nodes: of the tree, the root too. tokens: of a continuation. matches: continuations at most.

    longest, shortest: tokens of the suffix that is searched for. Raises InputError for a number out of range.
    """

    nodes: int = 64
    tokens: int = 10
    matches: int = 5000
    longest: int = ORDER
    shortest: int = 2

    def __post_init__(self) -> None:
        bounded(self, nodes=2, tokens=1, matches=1, longest=self.shortest, shortest=1)
        if self.longest > ORDER:
            raise InputError(f"longest is {self.longest}, datastores are sorted by {ORDER} tokens: take at most these")


@final
@dataclass(frozen=True)
class Rest:
    """Nothing is found for a text of fewer tokens than the shortest suffix."""

    store: Datastore
    options: RestOptions
    widest: ClassVar[int] = 0

    def draft(self, text: np.ndarray, generator: torch.Generator) -> TokenTree:
        by = self.options
        found = self.store.continuations(text, by.shortest, by.longest, by.matches, by.tokens)
        return trie(int(text[-1]), found, by.nodes)

    def settle(self, accepted: int, out: TreeOutput) -> None:
        """The datastore stays as it is."""

    def new(self) -> "Rest":
        return self
