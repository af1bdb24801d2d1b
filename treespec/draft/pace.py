"""How fast a text advances, by the measured times and what was accepted of it so far: what an auto tree is chosen by.

Modelled seconds, not a clock, so that the same seed gives the same text.
"""

from typing import final

from treespec.draft.times import Times

CYCLES = 6  # that the first guess counts for
TYPICAL = (2.5, 16, 4)  # the guess: tokens a cycle, nodes, levels


@final
class Pace:
    """Of one text."""

    def __init__(self, times: Times) -> None:
        tokens, nodes, levels = TYPICAL
        self.times = times
        self.forward = times.forward(times.nodes[-1])
        self.tokens, self.seconds = CYCLES * tokens, CYCLES * self.cost(nodes, levels)
        self.expected = self.accepted = CYCLES * (tokens - 1)

    def cost(self, nodes: int, levels: int, draws: int = 0) -> float:
        """Seconds of a cycle."""
        return float(self.forward[min(nodes, len(self.forward)) - 1]) + self.times.drafting(levels, draws)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def trust(self) -> float:
        """Accepted nodes for one that was expected."""
        return self.accepted / self.expected

    def settle(self, accepted: int, expected: float, nodes: int, levels: int, draws: int = 0) -> None:
        """A cycle has ended. expected: accepted nodes by the drafter's own chances, 0 if not known."""
        self.tokens += accepted + 1
        self.seconds += self.cost(nodes, levels, draws)
        if expected:
            self.accepted += accepted
            self.expected += expected
