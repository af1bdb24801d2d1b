"""Counts and seconds of one generation."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise, zip_longest
from typing import Any, final


@final
class StageSeconds(dict[str, float]):
    """Seconds by stage; a stage that has not run has 0. Unlike a defaultdict, `dataclasses.asdict` copies it."""

    def __missing__(self, stage: str) -> float:
        return 0.0


@dataclass
class Stats:
    """Counts of tokens and cycles, and seconds by stage.

    The seconds are the host's: on an accelerator the stage that synchronises includes the time of those
    before it. Requests of a batch share the seconds of their cycles evenly, so that the sum over requests
    is wall-clock time.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Those of them that were reused from the prefix cache or from another sample.
        new_tokens: Tokens of the answer.
        accepted: Accepted draft tokens in each cycle, cut at the end of the answer.
        drafted: Nodes drafted at depth 1, 2, … over all cycles.
        undrafted: Cycles without a draft token.
        seconds: By stage: prefill, draft, head (the draft model's forwards, a part of draft), target,
            verify, commit, total.
        truncated: Whether max_new_tokens or the context ended the answer, which may then break off
            mid-sentence or mid-object.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    undrafted: int = 0
    seconds: StageSeconds = field(default_factory=StageSeconds)
    truncated: bool = False

    @property
    def cycles(self) -> int:
        """Forwards of the target; each verifies one tree."""
        return len(self.accepted)

    @property
    def acceptance_length(self) -> float:
        """τ: tokens committed per target forward."""
        if not self.cycles:
            return 0.0
        return self.new_tokens / self.cycles

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the answer per second of total time, prefill included."""
        if not self.seconds["total"]:
            return 0.0
        return self.new_tokens / self.seconds["total"]

    @property
    def accepted_by_depth(self) -> list[int]:
        """Number of cycles that accepted a node at depth 1, 2, …"""
        counts = [0] * len(self.drafted)
        for accepted in self.accepted:
            for depth in range(min(accepted, len(counts))):
                counts[depth] += 1
        return counts

    @property
    def acceptance_by_depth(self) -> list[float]:
        """α at depth 1, 2, …: Pr(a cycle accepts this depth | it accepted the one above)."""
        cycles_by_depth = [self.cycles, *self.accepted_by_depth]
        return [below / above for above, below in pairwise(cycles_by_depth) if above]

    def to_json(self) -> dict[str, Any]:
        """All counts and seconds as fields for JSON, with the figures that follow from them."""
        figures = {
            "cycles": self.cycles,
            "acceptance_length": self.acceptance_length,
            "tokens_per_second": self.tokens_per_second,
        }
        return asdict(self) | figures

    def read_clock(self) -> float:
        """Read the clock that times stages, in seconds."""
        return time.perf_counter()

    def add(self, stats: "Stats") -> None:
        """Add another generation's counts and seconds."""
        for name in ("prompt_tokens", "cached_tokens", "new_tokens", "accepted", "undrafted"):
            setattr(self, name, getattr(self, name) + getattr(stats, name))
        self.drafted = _add_counts(self.drafted, stats.drafted)
        for stage, seconds in stats.seconds.items():
            self.seconds[stage] += seconds

    def count_drafted(self, per_depth: list[int]) -> None:
        """Add the number of nodes that one cycle drafted at depth 1, 2, …"""
        self.undrafted += not per_depth
        self.drafted = _add_counts(self.drafted, per_depth)


def _add_counts(counts: list[int], more_counts: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(counts, more_counts, fillvalue=0)]


@final
class StageTimer:
    """Time a stage that several requests pass together, and add an equal share to the seconds of each.

    stats: of the requests; entries that are appended within the block get a share, too.
    """

    __slots__ = ("stage", "start", "stats")

    def __init__(self, stats: Sequence[Stats], stage: str) -> None:
        self.stats = stats
        self.stage = stage

    def __enter__(self) -> None:
        self.start = self.stats[0].read_clock()

    def __exit__(self, *error: object) -> None:
        share = (self.stats[0].read_clock() - self.start) / len(self.stats)
        for stats in self.stats:
            stats.seconds[self.stage] += share


TAU_MEANING = "tokens per target forward"


def format_tau(tokens: int, cycles: int, explain: bool = True) -> str:
    """Write `32 tokens · τ 2.46`. explain: add the meaning of τ."""
    tau = tokens / cycles if cycles else 0.0
    meaning = f" ({TAU_MEANING})" if explain else ""
    return f"{tokens} tokens · τ {tau:.2f}{meaning}"


def format_figures(tokens: int, cycles: int, seconds: float, explain: bool = False) -> str:
    """Write a run's figures: `32 tokens · τ 2.46 · 45.1 tokens/s`. explain: add the meaning of τ."""
    speed = tokens / seconds if seconds else 0.0
    return f"{format_tau(tokens, cycles, explain)} · {speed:.1f} tokens/s"


def format_stats(stats: Stats, explain: bool = False) -> str:
    """Write the figures of one generation, as `format_figures` does."""
    return format_figures(stats.new_tokens, stats.cycles, stats.seconds["total"], explain)
