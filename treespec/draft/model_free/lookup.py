"""Look the text's last tokens up, and draft what followed them.

Prompt lookup (Saxena 2023) finds them earlier in the same text; transformers has it as
`prompt_lookup_num_tokens`, for one text at a time and one match. REST (He et al. 2024, 2311.08252)
finds them in a datastore.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import from_numpy, tensor

from treespec.draft.drafters import DrafterSpec
from treespec.draft.model_free.counts import union
from treespec.draft.model_free.datastore import Datastore, open_datastore
from treespec.draft.model_free.one_hot import OneHotDrafter, TextDrafter
from treespec.draft.model_free.suffix_index import Place
from treespec.draft.options import LookupOptions, RestOptions
from treespec.model.target import Target
from treespec.trees.mask import ancestor_mask
from treespec.trees.tree import TokenTree, best_first, connect


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
        return heaviest(int(text[-1]), found, by.nodes)


def heaviest(root: int, continuations: np.ndarray, nodes: int) -> TokenTree:
    """The tree of the `nodes` most frequent prefixes of thousands of continuations, the root included.

    continuations: [M, L] int64 tokens after the root, -1 after the end of a shorter one. Ties go to
    the shallower node, then to the first:

        a b
        c         root ─┬─ a 3 ─┬─ b 2
        a b             │       └─ d 1      4 nodes: root, a, b, c
        a d             └─ c 1
    """
    # 1. The prefixes, a level at a time: prefixes below one parent with one token are one node.
    above = np.zeros(len(continuations), dtype=np.int64)  # [M] deepest node of each continuation
    tokens, parents = [np.array([root])], [np.array([-1])]
    counts, depth, number = [np.array([np.inf])], [0], 1
    for level in range(continuations.shape[1]):
        going = continuations[:, level] >= 0
        continuations, above = continuations[going], above[going]
        if not len(continuations):
            break
        here = continuations[:, level]
        prefix = above * (here.max() + 1) + here
        _, first, group, count = np.unique(prefix, True, True, True)
        order = first.argsort()
        tokens.append(here[first[order]])
        parents.append(above[first[order]])
        counts.append(count[order])
        depth += [level + 1] * len(first)
        above, number = number + order.argsort()[group], number + len(first)

    # 2. The most frequent of them, as a tree.
    kept = best_first(from_numpy(np.concatenate(counts)), nodes).sort().values
    links = connect(kept, from_numpy(np.concatenate(parents)))
    ancestors = ancestor_mask(links, depth[-1])
    chosen = from_numpy(np.concatenate(tokens))[kept]
    return TokenTree(chosen, links, tensor(depth)[kept], ancestors)


def load_lookup(spec: DrafterSpec, target: Target) -> OneHotDrafter:
    return OneHotDrafter(Lookup(spec.options), "lookup")


def load_rest(spec: DrafterSpec, target: Target) -> OneHotDrafter:
    """Raises InputError for a damaged datastore, and for another tokenizer."""
    store = open_datastore(spec.place, target.tokenizer, target.vocab_size)
    return OneHotDrafter(Rest(store, spec.options), "rest")
