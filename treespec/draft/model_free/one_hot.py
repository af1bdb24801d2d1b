"""Drafters without a model: their tokens come from the sequence, a datastore or guesses.

The children are a function of the sequence and of earlier draws, so their distribution is one-hot. The
plan is that of `topk`: sample p and see whether the token is a child. No other scheme's q describes
them.

`--verifier auto` lets the target score no more than pays. A drafter without a model gives its tokens
no probabilities. So each child gets one by its rank among its siblings, corrected by what was accepted
so far (`treespec.draft.cost.running`).
"""

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from treespec.draft.cost.model import CostBy, best_size
from treespec.draft.cost.running import CERTAIN, CostModel, CostModels, Prediction
from treespec.draft.drafter import Renewed
from treespec.draft.grow.growth import ForcedDrafter
from treespec.draft.model_free.guess import Guess
from treespec.model.cache import TreeCache
from treespec.model.target import TreeOutput
from treespec.shaping.distribution import Distribution
from treespec.trees.tree import TokenTree
from treespec.verify.walk import Judging

# Pr(accepted) of the first, second, … child before any feedback; the last is for all further ones.
RATES = (0.6, 0.12, 0.06, 0.03)


class TextDrafter(Renewed, ABC):
    """Drafts for one sequence.

    predicts: whether its guesses have probabilities.
    """

    predicts: bool = False

    @abstractmethod
    def draft(self, text: np.ndarray) -> Guess:
        """The draft tokens below the last token, the root. text: [T] int64."""

    def update(self, guess: Guess, accepted: int, out: TreeOutput) -> Judging:
        """Feedback after a cycle: the draft tokens that the target scored, the number of accepted
        ones, and the target's output on their tree (`ForcedDrafter.learn`).
        """
        yield from ()

    def enter(self, cache: str | None) -> None:
        """A sequence begins. cache: the suffix cache that it may draft from, too; None: none."""
        return

    def remember(self, cache: str, completion: Sequence[int]) -> None:
        """A completion has ended, of any sequence."""
        return


@dataclass
class Row:
    """One sequence. models: what drafting costs and brings it; None: it drafts whole trees.

    text: [T] its observed tokens. guess: of this cycle; None: it goes without drafts.
    """

    drafter: TextDrafter
    models: CostModels | None
    text: np.ndarray
    guess: Guess | None = None


@final
class OneHotDrafter(ForcedDrafter):
    """A `TextDrafter` for each of B sequences; one at first.

    times: with them it drafts only the part of a tree that pays (`part`); None: whole trees.
    """

    per_text = ("rows",)
    one_hot = True

    def __init__(self, drafter: TextDrafter, times: CostBy | None = None) -> None:
        self.name, self.times = type(drafter).__name__.lower(), times
        self.rows = [self._row(drafter, np.empty(0, dtype=np.int64))]

    def _row(self, drafter: TextDrafter, text: np.ndarray) -> Row:
        return Row(drafter, CostModels(self.times) if self.times else None, text)

    @property
    def timed(self) -> bool:
        return self.times is not None

    def draft_trees(
        self,
        roots: Tensor,
        distributions: Sequence[Distribution],
        generators: Sequence[torch.Generator],
        cache: TreeCache,
        now: Callable[[], float] = time.perf_counter,
    ) -> list[TokenTree]:
        self.chains = [distribution.forced() for distribution in distributions]
        trees = []
        for number, (root, by) in enumerate(zip(roots.tolist(), distributions, strict=True)):
            model, row = self.cost_model(number), self.rows[number]
            waits = model and not row.drafter.predicts and pauses(model)
            row.guess, last = None, [root, *self.chains[number]]
            if not (waits or by.over):
                row.guess = self.guess(number, last, model)
            guess = row.guess or Guess()
            trees.append(guess.tree(last[-1], generators[number].device))
        return self.hung(roots, trees, generators)

    def guess(self, row: int, last: list[int], model: CostModel | None) -> Guess:
        """What it drafts for a sequence, or the part that pays. last: the root and the forced tokens."""
        text = np.append(self.rows[row].text, last)
        guess = self.rows[row].drafter.draft(text)
        return part(guess, model) if model else guess

    def cost_model(self, row: int) -> CostModel | None:
        """What drafting costs and brings this sequence; None: it drafts whole trees."""
        models = self.rows[row].models
        return models and models.among(len(self.rows))

    def learn(self, row: int, path: list[int], out: TreeOutput) -> Judging:
        own = self.rows[row]
        if own.models:
            own.models.present.update(path)
        if own.guess:
            yield from own.drafter.update(own.guess, len(path), out)

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        for row, new in zip(self.rows, tokens, strict=True):
            row.text = np.append(row.text, new[:-1].numpy())

    def enter(self, memory: str | None) -> None:
        self.rows[0].drafter.enter(memory)

    def remember(self, memory: str, answer: Sequence[int]) -> None:
        self.rows[0].drafter.remember(memory, answer)

    def rewind(self, lengths: Sequence[int]) -> None:
        pairs = zip(self.rows, lengths, strict=True)
        self.rows = [self._row(row.drafter.new(), row.text[:length]) for row, length in pairs]

    def new(self) -> "OneHotDrafter":
        return self.with_times(self.times)

    def with_times(self, times: CostBy | None) -> "OneHotDrafter":
        """Another of its kind that drafts only what pays."""
        return OneHotDrafter(self.rows[0].drafter.new(), times)


def part(guess: Guess, model: CostModel) -> Guess:
    """The nodes worth their time in the forward, with their probabilities.

    The cost model hears what this cycle's tree brings. Where the drafter has no probabilities, those by rank are
    corrected by what was accepted so far.
    """
    # 1. The probability that each node is reached.
    known, parents = guess.probabilities, np.array([-1, *guess.parents])
    probabilities = expected = by_rank(guess) if known is None else known
    if known is None:
        is_other = (probabilities < RATES[0]).astype(int)
        factors = model.by_law.factors[parents.clip(max=1), is_other]
        expected = (probabilities * factors).clip(max=CERTAIN)
        expected[0] = 1.0
    reach = guess.reach(expected)

    # 2. The most likely nodes, at the size that brings the most tokens a second.
    order = np.argsort(
        -reach, kind="stable"
    )  # a parent, and first of all the root, before its children
    size = best_size(reach[order[1:]], model.forward, model.plain)
    if known is None and model.trying:
        size = max(size, min(2, len(reach)))
    shorter = guess.part(np.sort(order[:size]), probabilities)

    # 3. Predict what they bring; of known probabilities there is nothing to learn.
    if known is not None:
        model.prediction = None
    elif size > 1:
        assert shorter.probabilities is not None
        seconds, kept = float(model.cost.seconds(size, 0)), np.array([-1, *shorter.parents])
        model.predict(Prediction(seconds, kept, shorter.probabilities), model.by_law)
    return shorter


def by_rank(guess: Guess) -> np.ndarray:
    """[N] Pr(a node is accepted | its parent was), by its rank among its siblings."""
    ranks, probabilities = Counter[int](), [1.0]
    for parent in guess.parents:
        probabilities.append(RATES[min(ranks[parent], len(RATES) - 1)])
        ranks[parent] += 1
    return np.array(probabilities)


def pauses(model: CostModel) -> bool:
    """Whether a sequence goes without drafts this cycle; asked before they are looked for."""
    first, deeper = (RATES[0] * model.by_law.factors[:, 0]).clip(max=CERTAIN)
    # [n] tokens that a chain of 0, 1, … draft tokens brings.
    tokens = 1 + first * (deeper ** np.arange(len(model.forward) - 1)).cumsum()
    seconds = model.forward + model.cost.overhead
    return model.pauses(float((tokens / seconds[1:]).max()))
