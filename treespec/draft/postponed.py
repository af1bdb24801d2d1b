"""Observations that wait until they are needed: shown one by one, they would cost time in every cycle."""

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from treespec.draft.drafter import PREFILL_AT, Observer


class Observation(NamedTuple):
    """The arguments of `observe`: by sequence the features [n, H] of committed positions, and their tokens [n + 1]."""

    features: Sequence[Tensor]
    tokens: Sequence[Tensor]


def join_observations(observations: Sequence[Observation]) -> Observation:
    """Joins the observations of successive cycles into one.

    One sequence, two cycles; the root of the second one is the last token of the first:

        tokens      a b c   and   c d   ->   a b c d
        features    x y     and   z     ->   x y z
    """
    if len(observations) == 1:
        return observations[0]
    joined_features = []
    joined_tokens = []
    for row, first_tokens in enumerate(observations[0].tokens):
        tokens = [first_tokens[:1]]
        tokens += [cycle.tokens[row][1:] for cycle in observations]
        joined_tokens.append(torch.cat(tokens))
        joined_features.append(torch.cat([cycle.features[row] for cycle in observations]))
    return Observation(joined_features, joined_tokens)


@final
class Postponed:
    """Observations that an observer has not been shown yet.

    Attributes:
        observer: sees them at `show`.
        observations: of successive cycles.
        positions: of a sequence in them, at most. More than PREFILL_AT together are a prompt, which a head reads at
            once.
    """

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.observations: list[Observation] = []
        self.positions = 0

    def add(self, observation: Observation) -> None:
        """Keeps an observation for later."""
        positions = max(map(len, observation.features))
        if self.positions + positions > PREFILL_AT:
            self.show()
        self.observations.append(observation)
        self.positions += positions

    def show(self) -> None:
        """Shows the observer all of them."""
        if self.observations:
            joined = join_observations(self.observations)
            self.observer.observe(joined.features, joined.tokens)
            self.observations = []
            self.positions = 0
