"""Suffix decoding (Oliaro et al. 2024, 2411.04975): what followed the text's last tokens before.

It looks in the text at hand and in all answers so far, takes the longest suffix that occurs there,
and drafts the likeliest continuations by their counts. The longer the match, the larger the draft.
"""

from collections.abc import Sequence
from typing import ClassVar, final

import numpy as np
import torch

from treespec.draft.model_free.given import Remembering
from treespec.draft.model_free.options import SuffixOptions
from treespec.draft.model_free.suffix_index import SuffixIndex, longest_match
from treespec.draft.model_free.suffix_memory import Memories, Memory
from treespec.draft.model_free.suffix_rates import Rates
from treespec.draft.model_free.suffix_tree import Guess, guess
from treespec.model.target import TreeOutput
from treespec.trees.tree import TokenTree


@final
class Suffix(Remembering):
    """Drafts for one text. Texts of one memory name share its answers, once these have ended."""

    widest: ClassVar[int] = 0

    def __init__(self, options: SuffixOptions, memories: Memories) -> None:
        self.options, self.memories = options, memories
        self.memory: Memory | None = None  # of the text that runs; None: it has its own text alone
        self.index, self.rates = SuffixIndex(), Rates()
        self.last = Guess()

    def enter(self, memory: str | None) -> None:
        self.memory = None if memory is None else self.memories.named(memory)

    def remember(self, memory: str, answer: Sequence[int]) -> None:
        self.memories.named(memory).add(answer)

    def draft(self, text: np.ndarray, generator: torch.Generator) -> TokenTree:
        return self.guess(text).tree(int(text[-1]))

    @property
    def chances(self) -> np.ndarray:
        return np.array([1.0, *self.last.chances])

    def guess(self, text: np.ndarray) -> Guess:
        """What may follow a text [T], which begins with the text of the call before."""
        # 1. What is new, and how right the last guess was.
        seen = len(self.index)
        if seen > len(text) or (seen and self.index.tokens[-1] != text[seen - 1]):
            self.index, seen = SuffixIndex(), 0  # forced tokens that did not follow after all
        self.index.extend(text[seen:].tolist())
        self.rates.learn(self.index.tokens)

        # 2. The guess of the text itself, and that of the memory: the more promising one.
        context = self.index.tokens
        guesses = [self._guess([self.index], context)]
        if self.memory:
            guesses.append(self._guess(self.memory.indexes, context))
        self.last = max(guesses, key=lambda made: made.score)
        self.rates.guessed(self.last, len(text))
        return self.last

    def _guess(self, indexes: Sequence[SuffixIndex], context: list[int]) -> Guess:
        by = self.options
        places = longest_match(indexes, context, by.longest, by.count)
        length = max((place.length for place in places), default=0)
        nodes = min(by.nodes, by.growth * length)
        return guess(places, nodes, by.percent / 100, self.rates.by_length, depth=by.nodes)

    def settle(self, accepted: int, out: TreeOutput) -> None:
        """It learns from the text alone."""

    def new(self) -> "Suffix":
        return Suffix(self.options, self.memories)
