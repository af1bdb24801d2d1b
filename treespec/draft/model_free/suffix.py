"""Suffix decoding (Oliaro et al. 2024, 2411.04975): what followed the text's last tokens before.

It looks in the sequence at hand and in all completions so far, takes the longest suffix that occurs
there, and drafts the most likely continuations by their counts. The longer the match, the larger the
draft.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np
import torch

from treespec.draft.drafters import DrafterSpec
from treespec.draft.model_free.datastore import fingerprint
from treespec.draft.model_free.matches import Guess, SuffixIndex, guess, longest_match
from treespec.draft.model_free.one_hot import OneHotDrafter, TextDrafter
from treespec.draft.model_free.suffix_cache import SuffixCache, SuffixCaches
from treespec.draft.options import SuffixOptions
from treespec.model.target import Target
from treespec.trees.tree import TokenTree

# (longest match, Pr(one of the children is right)) before anything is known; the last is for all more
BANDS = ((1, 0.2), (3, 0.4), (7, 0.6), (15, 0.75), (31, 0.85), (32, 0.9))
WEIGHT = 3.0  # guesses that the first rates count for
FORGET = 0.98  # weight of what was learned before, a guess


@final
class Suffix(TextDrafter):
    """Drafts for one sequence. Those of one cache name share its completions, once these have ended."""

    def __init__(self, options: SuffixOptions, caches: SuffixCaches) -> None:
        self.options, self.caches = options, caches
        self.cache: SuffixCache | None = None  # None: it drafts from its own text alone
        self.index, self.rates, self.last = SuffixIndex(), Rates(), Guess()
        self.probabilities = np.ones(1)

    def enter(self, cache: str | None) -> None:
        self.cache = None if cache is None else self.caches.named(cache)

    def remember(self, cache: str, completion: Sequence[int]) -> None:
        self.caches.named(cache).add(completion)

    def draft(self, text: np.ndarray, generator: torch.Generator) -> TokenTree:
        return self.guess(text).tree(int(text[-1]))

    def guess(self, text: np.ndarray) -> Guess:
        """What may follow a text [T], which begins with the text of the call before."""
        # 1. What is new, and how right the last guess was.
        seen = len(self.index)
        if seen > len(text) or (seen and self.index.tokens[-1] != text[seen - 1]):
            self.index, seen = SuffixIndex(), 0  # forced tokens that did not follow after all
        self.index.extend(text[seen:].tolist())
        self.rates.learn(self.index.tokens)

        # 2. The guess of the text itself, and that of the cache: the more promising one.
        guesses = [self._guess([self.index])]
        if self.cache:
            guesses.append(self._guess(self.cache.indexes))
        self.last = max(guesses, key=lambda made: made.score)
        self.rates.guessed(self.last, len(text))
        self.probabilities = np.array([1.0, *self.last.probabilities])
        return self.last

    def _guess(self, indexes: Sequence[SuffixIndex]) -> Guess:
        by = self.options
        places = longest_match(indexes, self.index.tokens, by.longest, by.count)
        length = max((place.length for place in places), default=0)
        nodes = min(by.nodes, by.growth * length)
        return guess(places, nodes, by.percent / 100, self.rates.by_length, depth=by.nodes)


@final
class Rates:
    """How often guesses were right in one text, by the length of the match.

    It learns from the text alone, whether or not a guess was drafted and accepted.
    """

    def __init__(self) -> None:
        self._promised = [WEIGHT for _ in BANDS]
        self._kept = [WEIGHT * rate for _, rate in BANDS]
        self._last, self._at = Guess(), 0

    @property
    def by_length(self) -> list[float]:
        """The rate for matches of 0, 1, … tokens; the last one is for all longer ones."""
        rates, first = [0.0], 1
        for (last, _), promised, kept in zip(BANDS, self._promised, self._kept, strict=True):
            rates += [min(kept / promised, 0.98)] * (last + 1 - first)
            first = last + 1
        return rates

    def guessed(self, guess: Guess, at: int) -> None:
        """A guess of what follows the text's first `at` tokens."""
        self._last, self._at = guess, at

    def learn(self, text: list[int]) -> None:
        """Compare the last guess with the text, which has grown."""
        # 1. Children by node.
        last, self._last = self._last, Guess()
        child_of: dict[tuple[int, int], int] = {}
        shares: dict[int, float] = {}
        links = zip(last.parents, last.tokens, last.shares, strict=True)
        for child, (parent, token, share) in enumerate(links, start=1):
            child_of[parent, token] = child
            shares[parent] = shares.get(parent, 0.0) + share

        # 2. Along the text, as far as the guess goes.
        node: int | None = 0
        for depth, token in enumerate(text[self._at :]):
            if node is None or node not in shares:
                return
            bands = (row for row, (most, _) in enumerate(BANDS) if last.length + depth <= most)
            band, below = next(bands, len(BANDS) - 1), child_of.get((node, token))
            self._promised[band] = FORGET * self._promised[band] + shares[node]
            self._kept[band] = FORGET * self._kept[band] + (below is not None)
            node = below


def load_suffix(spec: DrafterSpec, target: Target) -> OneHotDrafter:
    """`--drafter suffix` and `suffix:FOLDER,tokens=5000`. Raises InputError."""
    root = Path(spec.place).expanduser() if spec.place else None
    of_target = fingerprint(target.tokenizer, target.vocab_size), target.vocab_size
    caches = SuffixCaches(spec.options.tokens, root, *of_target)
    return OneHotDrafter(Suffix(spec.options, caches), "suffix")
