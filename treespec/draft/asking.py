"""When the sequences of a batch are asked for drafts: in each cycle, or seldom while drafts bring little.

To ask each sequence takes several percent of a cycle in which each gets one token. The choice depends on past cycles
alone, so the output keeps its distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

LEAST_ACCEPTED = 0.06  # draft tokens of a sequence and cycle that are worth asking in each cycle
FIRST_ACCEPTED = 0.15  # of a batch that was not asked yet
ACCEPTED_DECAY = 0.9  # factor of the weight of earlier cycles, for each cycle
WAIT_CYCLES = 7  # cycles without drafts after one that brought too little, as texts may become easier to draft


@final
@dataclass
class AskingSchedule:
    """Which cycles of a batch draft.

    Nothing is accepted, and the mean falls below `LEAST_ACCEPTED` in the third of these cycles; A: asked:

        A A A . . . . . . . A . . . . . . . A
              7 cycles        7 cycles

    Attributes:
        accepted: draft tokens of a sequence and cycle, a decayed mean over the cycles that were asked.
        wait: cycles without drafts that are still to come.
    """

    accepted: float = FIRST_ACCEPTED
    wait: int = 0

    def begin_cycle(self) -> bool:
        """Begins a cycle. Returns whether the batch is asked in it."""
        if self.wait:
            self.wait -= 1
            return False
        return True

    def learn(self, paths: Sequence[Sequence[int]]) -> None:
        """Learns from a cycle that was asked. paths: of each sequence, the accepted nodes."""
        accepted = sum(map(len, paths)) / len(paths)
        self.accepted += (1 - ACCEPTED_DECAY) * (accepted - self.accepted)
        if self.accepted < LEAST_ACCEPTED:
            self.wait = WAIT_CYCLES
