"""Look the text's last tokens up, and draft what followed them.

Prompt lookup (Saxena 2023) finds them earlier in the same text; transformers has it as
`prompt_lookup_num_tokens`, for one text at a time and one match. REST (He et al. 2024, 2311.08252)
finds them in a datastore.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from treespec.draft.drafters import DrafterSpec
from treespec.draft.model_free.datastore import Datastore, open_datastore
from treespec.draft.model_free.matches import Place, union
from treespec.draft.model_free.one_hot import OneHotDrafter, TextDrafter
from treespec.draft.options import LookupOptions, RestOptions
from treespec.model.target import Target
from treespec.trees.tree import TokenTree


@final
@dataclass(frozen=True)
class Lookup(TextDrafter):
    """It takes the earliest matches: the text ends soon after a late one."""

    options: LookupOptions

    def draft(self, text: np.ndarray, generator: torch.Generator) -> TokenTree:
        by = self.options
        starts = (matches(text, by.ngram)[: by.matches] + 1).tolist()
        places = [Place(1, text[start : start + by.tokens].tolist(), 0) for start in starts]
        return union(places, by.matches * by.tokens, by.tokens).tree(int(text[-1]))


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


@final
@dataclass(frozen=True)
class Rest(TextDrafter):
    """A text of fewer tokens than the shortest suffix gets no drafts."""

    store: Datastore
    options: RestOptions

    def draft(self, text: np.ndarray, generator: torch.Generator) -> TokenTree:
        by = self.options
        found = self.store.continuations(text, by.shortest, by.longest, by.matches, by.tokens)
        places = [Place(1, tokens, 0) for tokens in found.tolist()]
        return union(places, by.nodes - 1, by.tokens).tree(int(text[-1]))


def load_lookup(spec: DrafterSpec, target: Target) -> OneHotDrafter:
    return OneHotDrafter(Lookup(spec.options), "lookup")


def load_rest(spec: DrafterSpec, target: Target) -> OneHotDrafter:
    """Raises InputError for a damaged datastore, and for another tokenizer."""
    store = open_datastore(spec.place, target.tokenizer, target.vocab_size)
    return OneHotDrafter(Rest(store, spec.options), "rest")
