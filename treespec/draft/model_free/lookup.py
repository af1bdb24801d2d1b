"""Prompt lookup (Saxena 2023): the text's last tokens stood earlier; draft what followed there.

transformers has it as `prompt_lookup_num_tokens`, for one text at a time and one match.
"""

from typing import ClassVar, final

import numpy as np
import torch

from treespec.draft.model_free.options import LookupOptions
from treespec.draft.model_free.trie import trie
from treespec.model.target import TreeOutput
from treespec.trees.tree import TokenTree


@final
class Lookup(LookupOptions):
    """It takes the earliest matches: the text ends soon after a late one."""

    widest: ClassVar[int] = 0

    def draft(self, text: np.ndarray, generator: torch.Generator) -> TokenTree:
        ends = matches(text, self.ngram)[: self.matches]
        places = ends[:, None] + np.arange(1, self.tokens + 1)  # [M, L]
        found = np.where(places < len(text), text[places.clip(max=len(text) - 1)], -1)
        return trie(int(text[-1]), found, nodes=1 + found.size)

    def settle(self, accepted: int, out: TreeOutput) -> None:
        """It learns from the text alone."""

    def new(self) -> "Lookup":
        return self


def matches(text: np.ndarray, ngram: int) -> np.ndarray:
    """[M] ascending: end positions of the earlier occurrences of the longest repeated suffix.

    text: [T]. ngram: the most tokens of that suffix. The suffix `c a b` of 3 tokens also ends at 4:

        position   0 1 2 3 4 5 6 7
        text       a b c a b c a b
    """
    found = np.flatnonzero(text[:-1] == text[-1])
    for back in range(1, ngram):
        longer = found[found >= back]
        longer = longer[text[longer - back] == text[-1 - back]] if back < len(text) else longer[:0]
        if not len(longer):
            break
        found = longer
    return found
