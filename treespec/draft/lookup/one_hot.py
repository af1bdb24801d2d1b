"""Drafters without a model, which find draft tokens by a rule such as a lookup.

The children are a deterministic function of the sequence and of earlier draws, so their distribution is one-hot.
They are verified as `topk` does it: sample p and see whether the token is a child. Other schemes need a q.

With `--verifier auto` and a guess with probabilities, the target scores only the nodes worth their time.
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
from treespec.draft.drafter import Drafter
from treespec.draft.forced import list_forced_chains
from treespec.draft.lookup.guess import Guess
from treespec.model.cache import TreeCache
from treespec.sampling.sampler import Sampler
from treespec.trees.tree import TokenTree
from treespec.verify.topk import TopK

MIN_TEXT_ROOM = 256  # tokens that a sequence has room for from the start
FORCED_SCHEME = TopK()  # its trees have no draft distributions: it draws nothing


class TextDrafter(ABC):
    """Drafts for one sequence without a model. Subclass it to add a drafter.

    Attributes:
        wants_argmax: whether it learns from the target's most likely tokens (`learn_argmax`). The target then
            scores whole guesses.
    """

    wants_argmax: bool = False

    def new(self) -> Self:
        """Returns a drafter with the same options, for another sequence.

        It is called on a drafter that has not drafted yet, so by default it is a deep copy. Override it if
        sequences share something, such as a model or a store.
        """
        return copy.deepcopy(self)

    @abstractmethod
    def draft(self, text: np.ndarray) -> Guess:
        """Returns the draft tokens below the last token, the root.

        text: [T] int64, the sequence so far; its memory is used again after the call.
        """

    def set_least_scores(self, scores: Sequence[float]) -> None:
        """Called before `draft`. A guess whose expected accepted tokens are too few may be left out.

        scores: by the number of draft tokens, from 0: accepted tokens that are worth the time, and no more.
        """
        return

    def learn_argmax(self, argmax: np.ndarray) -> None:
        """Called after the target has scored the last guess, if `wants_argmax`.

        argmax: [N] int64, the target's most likely token after each node of the guess; node 0 is the root.
        """
        return

    def enter(self, cache: str | None) -> None:
        """Called when a sequence begins. cache: the name of the suffix cache that it may draft from; None: none."""
        return

    def remember(self, cache: str, completion: Sequence[int]) -> None:
        """Called when a completion of any sequence has ended. cache: the name of its suffix cache."""
        return


@final
class GrowingText:
    """The observed tokens of a sequence. Tokens are appended in place, so that a cycle does not copy the text.

        room       a b c d . . . .
        length     4
        get_with_tail([x, y])   a b c d x y

    Attributes:
        room: [R] int64, the tokens, then room for further ones.
        length: the number of tokens.
    """

    def __init__(self, tokens: np.ndarray) -> None:
        self.room = np.empty(MIN_TEXT_ROOM, dtype=np.int64)
        self.length = 0
        self.append(tokens)

    def append(self, tokens: np.ndarray | Sequence[int]) -> None:
        """Appends tokens."""
        self.length = len(self.get_with_tail(tokens))

    def get_with_tail(self, tokens: np.ndarray | Sequence[int]) -> np.ndarray:
        """Returns the text followed by tokens that are not appended: a view, valid until the next call."""
        end = self.length + len(tokens)
        if end > len(self.room):
            larger = np.empty(2 * end, dtype=np.int64)
            larger[: self.length] = self.room[: self.length]
            self.room = larger
        self.room[self.length : end] = tokens
        return self.room[:end]


@dataclass
class LookupRow:
    """One sequence of a batch.

    Attributes:
        drafter: drafts for this sequence.
        text: its observed tokens.
        guess_nodes: number of nodes of this cycle's guess, with its root. They are the last ones of the tree, below
            any forced tokens. 0: it was not asked for a guess.
    """

    drafter: TextDrafter
    text: GrowingText
    guess_nodes: int = 0


@final
class OneHotDrafter(Drafter):
    """Drafts with a `TextDrafter` for each of B sequences; one at first.

    Attributes:
        unused: the drafter whose `new` creates those of the sequences; it never drafts itself.
        times: the cost by batch size, to keep only nodes worth their time (`keep_profitable_nodes`); None:
            whole trees, as for all drafters that learn from the target's scores of them.
    """

    one_hot = True
    states: list[LookupRow]

    def __init__(self, drafter: TextDrafter, times: CostBy | None = None) -> None:
        self.name = type(drafter).__name__.lower()
        self.wants_argmax = drafter.wants_argmax
        self.unused = drafter
        self.times = times
        if self.wants_argmax:
            self.times = None
        self.states = [LookupRow(drafter.new(), GrowingText(np.empty(0, dtype=np.int64)))]

    @property
    def timed(self) -> bool:
        return self.times is not None

    @property
    def cost(self) -> CycleCost | None:
        """The cost of a cycle of these sequences; None: it drafts whole trees."""
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
        chains = list_forced_chains(roots, distributions)
        trees = []
        for row, forced in enumerate(chains.forced):
            guess = Guess()
            self.states[row].guess_nodes = 0
            if not forced.ends:
                guess = self.guess(row, chains.list_last_tokens(row))
                self.states[row].guess_nodes = 1 + len(guess.tokens)
            trees.append(guess.build_token_tree(chains.ends[row], generators[row].device))
        return chains.prepend_to(trees, FORCED_SCHEME, generators)

    def guess(self, row: int, last: list[int]) -> Guess:
        """Drafts for a sequence; with a cost it keeps only the nodes worth their time.

        last: the root and the forced tokens.
        """
        state = self.states[row]
        cost = self.cost
        if cost is None:
            return state.drafter.draft(state.text.get_with_tail(last))
        state.drafter.set_least_scores(cost.least_scores)
        guess = state.drafter.draft(state.text.get_with_tail(last))
        return keep_profitable_nodes(guess, cost)

    def learn_argmax(self, argmax: Sequence[Tensor | None]) -> None:
        for state, tokens in zip(self.states, argmax, strict=True):
            if tokens is not None and state.guess_nodes:
                state.drafter.learn_argmax(tokens.numpy()[-state.guess_nodes :])

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        for state, new_tokens in zip(self.states, tokens, strict=True):
            state.text.append(new_tokens.numpy()[:-1])

    def enter(self, memory: str | None) -> None:
        self.states[0].drafter.enter(memory)

    def remember(self, memory: str, answer: Sequence[int]) -> None:
        self.states[0].drafter.remember(memory, answer)

    def rewind(self, lengths: Sequence[int]) -> None:
        for row, length in enumerate(lengths):
            tokens = self.states[row].text.get_with_tail([])[:length]
            self.states[row] = LookupRow(self.unused.new(), GrowingText(tokens))

    def new(self) -> "OneHotDrafter":
        return self.copy_with_costs(self.times)

    def copy_with_costs(self, times: CostBy | None) -> "OneHotDrafter":
        """Returns a new drafter that keeps only the nodes worth their time; with None it drafts whole trees."""
        return OneHotDrafter(self.unused, times)


def keep_profitable_nodes(guess: Guess, cost: CycleCost) -> Guess:
    """Keeps the most likely nodes, at the size with the most tokens per second; all without probabilities."""
    if guess.probabilities is None or not len(guess.tokens):
        return guess
    reach = guess.compute_reach(guess.probabilities)
    order = np.argsort(-reach, kind="stable")  # the root is first, and a parent before its children
    size = find_best_size(reach[order[1:]].tolist(), cost.forward_prices, cost.baseline_speed)
    return guess.keep_nodes(np.sort(order[:size]))
