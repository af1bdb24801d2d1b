"""Whose drafts a cycle takes: the memory's or the draft model's, whichever promise more."""

from typing import final

from treespec.draft.pace.pace import Pace

FORGET = 0.9  # weight of the cycles before, a cycle
FIRST = 4.0  # cycles that the first estimate counts for
EXPECTED = 1.5  # accepted tokens of a draft model of which nothing is known


@final
class Choice:
    """What the draft model brought to one text so far: tokens, and modelled seconds.

    It depends on the text's past alone, so no verifier's law changes by it.
    """

    def __init__(self) -> None:
        self.cycles, self.tokens, self.seconds = FIRST, FIRST * (1 + EXPECTED), 0.0

    def prefers_memory(self, score: float, nodes: int, pace: Pace | None) -> bool:
        """Whether to take the memory's drafts.

        score: accepted tokens that they promise. nodes: of their tree. pace: with it tokens a second
        count, else tokens a cycle.
        """
        if pace is None:
            return 1 + score > self.tokens / self.cycles
        forward = float(pace.forward[min(nodes, len(pace.forward)) - 1])
        speed = (1 + score) / (forward + pace.times.resting(0))
        return speed > max(pace.plain, self._speed(pace))

    def _speed(self, pace: Pace) -> float:
        """Tokens a second of the draft model's cycles; before any, at the price of a chain of two."""
        seconds = self.seconds or FIRST * pace.cost(3, 2)
        return self.tokens / seconds

    def settle(self, accepted: int, seconds: float | None) -> None:
        """A cycle of the draft model has ended. seconds: modelled; None: nobody knows."""
        if seconds is not None:
            start = self.seconds or FIRST * seconds
            self.seconds = FORGET * start + seconds
        self.cycles = FORGET * self.cycles + 1
        self.tokens = FORGET * self.tokens + 1 + accepted
