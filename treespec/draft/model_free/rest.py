"""REST (He et al. 2024, 2311.08252): look up the text's last tokens in a datastore.

The continuations found there are merged into a tree.
"""

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import torch

from treespec.draft.model_free.datastore import Datastore
from treespec.draft.model_free.options import RestOptions
from treespec.draft.model_free.trie import trie
from treespec.model.target import TreeOutput
from treespec.trees.tree import TokenTree


@final
@dataclass(frozen=True)
class Rest:
    """A text of fewer tokens than the shortest suffix gets no drafts."""

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
