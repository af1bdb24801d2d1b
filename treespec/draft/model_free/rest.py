"""REST (He et al. 2024, 2311.08252): look up the text's last tokens in a datastore.

The continuations found there are merged into a tree.
"""

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import torch

from treespec.draft.model_free.datastore import ORDER, Datastore
from treespec.draft.model_free.trie import trie
from treespec.errors import InputError
from treespec.options import TOKENS, check_ranges, option
from treespec.target import TreeOutput
from treespec.trees.tree import TokenTree


@dataclass(frozen=True)
class RestOptions:
    """nodes: size of the tree with its root. tokens: length of a continuation.

    matches: the most continuations. longest, shortest: bounds of the suffix to search for. Raises
    InputError for a number out of range.
    """

    nodes: int = option("of the tree, the root too", 64, least=2, most=4096)
    tokens: int = option("of a continuation", 10, least=1, most=4095)
    matches: int = option("continuations at most", 5000, least=1, most=TOKENS)
    longest: int = option("tokens of the suffix that is searched for", ORDER, least=1, most=ORDER)
    shortest: int = option("and the least of them", 2, least=1, most=ORDER)

    def __post_init__(self) -> None:
        check_ranges(self, flag="")
        if self.longest < self.shortest:
            raise InputError(
                f"longest is {self.longest}, must be at least shortest, {self.shortest}"
            )


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
