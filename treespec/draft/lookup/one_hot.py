"""Drafters without a model: their tokens come from the sequence, or from guesses.

The children are a function of the sequence and of earlier draws, so their distribution is one-hot. The
plan is that of `topk`: sample p and see whether the token is a child. No other scheme's q describes
them.

`--verifier auto` lets the target score no more than pays, where a guess has probabilities.
"""

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, final

import numpy as np
import torch
from torch import Tensor

from treespec.draft.auto.cost import CostBy, CycleCost, find_best_size
from treespec.draft.lookup.guess import Guess
from treespec.draft.tree_assembly import ForcedDrafter
from treespec.model.cache import TreeCache
from treespec.sampling.sampler import Sampler
from treespec.trees.tree import TokenTree


class TextDrafter(ABC):
    """Drafts for one sequence."""

    def new(self) -> Self:
        """A drafter with the same options, for another sequence.

        It is asked of a drafter that has not drafted yet. So a deep copy does, unless sequences share
        something, such as a model or a store: a class that holds one returns a drafter that shares it.
        """
        return copy.deepcopy(self)

    @abstractmethod
    def draft(self, text: np.ndarray) -> Guess:
        """The draft tokens below the last token, the root. text: [T] int64."""

    def enter(self, cache: str | None) -> None:
        """A sequence begins. cache: the suffix cache that it may draft from, too; None: none."""
        return

    def remember(self, cache: str, completion: Sequence[int]) -> None:
        """A completion has ended, of any sequence."""
        return


@dataclass
class LookupRow:
    """One sequence. text: [T] its observed tokens."""

    drafter: TextDrafter
    text: np.ndarray


@final
class OneHotDrafter(ForcedDrafter):
    """A `TextDrafter` for each of B sequences; one at first.

    unused: the drafter that those of sequences are made from (`TextDrafter.new`); it drafts nothing
    itself. times: with them only the part of a tree that pays is drafted (`keep_profitable_nodes`); None: whole trees.
    """

    one_hot = True
    states: list[LookupRow]

    def __init__(self, drafter: TextDrafter, times: CostBy | None = None) -> None:
        self.name = type(drafter).__name__.lower()
        self.unused = drafter
        self.times = times
        self.states = [LookupRow(drafter.new(), np.empty(0, dtype=np.int64))]

    @property
    def timed(self) -> bool:
        return self.times is not None

    @property
    def cost(self) -> CycleCost | None:
        """What a cycle of these sequences costs; None: it drafts whole trees."""
        if self.times is None:
            return None
        return self.times(len(self.states))

    def draft_trees(
        self,
        roots: Tensor,
        distributions: Sequence[Sampler],
        generators: Sequence[torch.Generator],
        cache: TreeCache,
        now: Callable[[], float] = time.perf_counter,
    ) -> list[TokenTree]:
        self.forced = [distribution.list_forced_tokens() for distribution in distributions]
        trees = []
        for row, (root, forced) in enumerate(zip(roots.tolist(), self.forced, strict=True)):
            last_tokens = [root, *forced.ids]
            guess = Guess()
            if not forced.ends:
                guess = self.guess(row, last_tokens)
            trees.append(guess.build_token_tree(last_tokens[-1], generators[row].device))
        return self.prepend_forced_all(roots, trees, generators)

    def guess(self, row: int, last: list[int]) -> Guess:
        """What it drafts for a sequence, or the part that pays. last: the root and the forced tokens."""
        state = self.states[row]
        guess = state.drafter.draft(np.append(state.text, last))
        cost = self.cost
        if cost is None:
            return guess
        return keep_profitable_nodes(guess, cost)

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        for state, new_tokens in zip(self.states, tokens, strict=True):
            state.text = np.append(state.text, new_tokens[:-1].numpy())

    def enter(self, memory: str | None) -> None:
        self.states[0].drafter.enter(memory)

    def remember(self, memory: str, answer: Sequence[int]) -> None:
        self.states[0].drafter.remember(memory, answer)

    def rewind(self, lengths: Sequence[int]) -> None:
        for row, length in enumerate(lengths):
            self.states[row] = LookupRow(self.unused.new(), self.states[row].text[:length])

    def new(self) -> "OneHotDrafter":
        return self.copy_with_costs(self.times)

    def copy_with_costs(self, times: CostBy | None) -> "OneHotDrafter":
        """Another of its kind that drafts only what pays."""
        return OneHotDrafter(self.unused, times)


def keep_profitable_nodes(guess: Guess, cost: CycleCost) -> Guess:
    """The nodes worth their time in the forward: the most likely ones, at the size that pays most.

    All of them, where the guess has no probabilities.
    """
    if guess.probabilities is None:
        return guess
    reach = guess.compute_reach(guess.probabilities)
    order = np.argsort(-reach, kind="stable")  # the root is first, and a parent before its children
    size = find_best_size(
        reach[order[1:]], cost.predict_forward_seconds(cost.nodes[-1]), cost.baseline_speed
    )
    return guess.keep_nodes(np.sort(order[:size]))
