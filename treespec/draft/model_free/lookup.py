"""Prompt lookup (Saxena 2023): the text's last tokens stood earlier; draft what followed there.

transformers has it as `prompt_lookup_num_tokens`, for one text at a time and one match.
"""

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import torch

from treespec.draft.model_free.trie import trie
from treespec.options import check_ranges, option
from treespec.target import TreeOutput
from treespec.trees.tree import TokenTree


@final
@dataclass(frozen=True)
class Lookup:
    """tokens: length of a continuation. ngram: the most last tokens to match; the longest match
    counts. matches: number of continuations merged into a tree.

    It takes the earliest matches: the text ends soon after a late one. Raises InputError for a
    number out of range.
    """

    tokens: int = option("of a continuation", 10, least=1, most=4095)
    ngram: int = option("last tokens that are looked for, at most", 3, least=1, most=64)
    matches: int = option("continuations that are merged into a tree", 1, least=1, most=4096)
    widest: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_ranges(self, flag="")

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
