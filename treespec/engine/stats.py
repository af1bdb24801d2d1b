"""Counts and seconds of one generation."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest


@dataclass
class Stats:
    """Counts of tokens and cycles, and seconds by stage.

    accepted: accepted nodes by cycle, cut at the end of the text. drafted: nodes drafted at depth
    1, 2, … over all cycles. undrafted: cycles without a draft token. seconds: by stage:
    prefill, draft (of it head: the draft model's forwards), target, verify, commit, total. They are
    the host's: on an accelerator the stage that waits has the time of those before it. Texts of a
    batch share the seconds of their cycles evenly, so that the sum over texts is wall-clock time.
    truncated: whether max_new_tokens or the context ended the text, which may then be half a
    sentence, or half an object.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    undrafted: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    truncated: bool = False

    @property
    def cycles(self) -> int:
        return len(self.accepted)

    @property
    def acceptance_length(self) -> float:
        """τ: tokens committed per target forward."""
        if not self.cycles:
            return 0.0
        return self.new_tokens / self.cycles

    @property
    def tokens_per_second(self) -> float:
        if not self.seconds["total"]:
            return 0.0
        return self.new_tokens / self.seconds["total"]

    @property
    def accepted_by_depth(self) -> list[int]:
        """Cycles that accepted a node at depth 1, 2, …"""
        counts = [0] * len(self.drafted)
        for accepted in self.accepted:
            for depth in range(min(accepted, len(counts))):
                counts[depth] += 1
        return counts

    @property
    def acceptance_by_depth(self) -> list[float]:
        """α at depth 1, 2, …: Pr(a cycle accepts this depth | it accepted the one above)."""
        reached = [self.cycles, *self.accepted_by_depth]
        return [b / a for a, b in pairwise(reached) if a]

    def read_clock(self) -> float:
        """The clock that times stages, in seconds."""
        return time.perf_counter()

    def add(self, stats: "Stats") -> None:
        """Add another generation's counts and seconds."""
        for name in ("prompt_tokens", "cached_tokens", "new_tokens", "accepted", "undrafted"):
            setattr(self, name, getattr(self, name) + getattr(stats, name))
        self.drafted = _add_counts(self.drafted, stats.drafted)
        for stage, seconds in stats.seconds.items():
            self.seconds[stage] += seconds

    def count_drafted(self, per_depth: list[int]) -> None:
        """Add one cycle's nodes at depth 1, 2, …"""
        self.undrafted += not per_depth
        self.drafted = _add_counts(self.drafted, per_depth)


def _add_counts(one: list[int], other: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]


@contextmanager
def shared(texts: Sequence[Stats], stage: str) -> Iterator[None]:
    """Time a stage that several texts go through together, and give each an equal share of it."""
    started = texts[0].read_clock()
    try:
        yield
    finally:
        share = (texts[0].read_clock() - started) / len(texts)
        for stats in texts:
            stats.seconds[stage] += share


TAU_MEANING = "tokens per target forward"  # the meaning of τ


def format_figures(tokens: int, cycles: int, seconds: float, explain: bool = False) -> str:
    """`32 tokens · τ 2.46 · 45.1 tokens/s`. explain: add the meaning of τ, at its first use."""
    tau = tokens / cycles if cycles else 0.0
    speed = tokens / seconds if seconds else 0.0
    meaning = f" ({TAU_MEANING})" if explain else ""
    return f"{tokens} tokens · τ {tau:.2f}{meaning} · {speed:.1f} tokens/s"


def format_stats(stats: Stats, explain: bool = False) -> str:
    return format_figures(stats.new_tokens, stats.cycles, stats.seconds["total"], explain)
