"""Counts and times of a server in Prometheus' format."""

import time
from collections.abc import Callable
from functools import partial
from typing import final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from treespec.api.engine import Engine
from treespec.decoding.sequence import Piece
from treespec.requests.output import Completion

COUNTERS = {  # what each counts, and its labels
    "requests": ("HTTP requests", "path", "status"),
    "answers": ("answers of the engine", "end"),
    "prompt_tokens": ("prompt tokens",),
    "cached_prompt_tokens": ("prompt tokens not computed again",),
    "completion_tokens": ("tokens of answers",),
    "drafted_tokens": ("nodes of drafted trees",),
    "accepted_tokens": ("drafted tokens that answers kept",),
    "cycles": ("cycles of answers",),
}
SHORT = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TAUS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10)
HISTOGRAMS = {  # what each measures, and its buckets
    "acceptance_length": ("tokens per cycle, by answer", TAUS),
    "cycle_seconds": ("seconds between an answer's cycles", SHORT),
    "first_token_seconds": ("seconds to the first tokens", LONG),
    "answer_seconds": ("seconds of a whole answer", LONG),
}


@final
class Metrics:
    """Its own registry, so that one process may hold several servers."""

    def __init__(self, engine: Engine) -> None:
        self.registry = registry = CollectorRegistry()
        self.counts = {
            name: Counter(f"treespec_{name}", help, labels, registry=registry)
            for name, (help, *labels) in COUNTERS.items()
        }
        self.times = {
            name: Histogram(f"treespec_{name}", help, buckets=buckets, registry=registry)
            for name, (help, buckets) in HISTOGRAMS.items()
        }
        for name in ("running", "waiting"):
            gauge = Gauge(f"treespec_{name}", f"answers that are {name}", registry=registry)
            gauge.set_function(partial(getattr, engine, name))

    def watch(self) -> Callable[[Piece | None], None]:
        """Times one answer from now on. The engine's thread calls the result for every piece."""
        started = latest = time.perf_counter()
        pieces = 0

        def seen(piece: Piece | None) -> None:
            nonlocal latest, pieces
            now = time.perf_counter()
            pieces += 1
            if piece is None:
                self.times["answer_seconds"].observe(now - started)
            elif pieces == 1:
                self.times["first_token_seconds"].observe(now - started)
                latest = now
            elif not piece.drafted:  # the target's own token ends a cycle
                self.times["cycle_seconds"].observe(now - latest)
                latest = now

        return seen

    def count(self, answer: Completion, done: bool) -> None:
        """Add an answer that has ended. done: False for one that was cut off."""
        stats = answer.stats
        end = "error" if answer.error else "done" if done else "cancelled"
        self.counts["answers"].labels(end).inc()
        for name, number in {
            "prompt_tokens": stats.prompt_tokens,
            "cached_prompt_tokens": stats.cached_tokens,
            "completion_tokens": stats.new_tokens,
            "drafted_tokens": sum(stats.drafted),
            "accepted_tokens": sum(stats.accepted),
            "cycles": stats.cycles,
        }.items():
            self.counts[name].inc(number)
        if stats.cycles:
            self.times["acceptance_length"].observe(stats.acceptance_length)

    def mean_seconds(self) -> float:
        """Mean seconds of the answers so far; 1 before the first."""
        count = self.registry.get_sample_value("treespec_answer_seconds_count")
        total = self.registry.get_sample_value("treespec_answer_seconds_sum")
        return total / count if total and count else 1.0

    def text(self) -> bytes:
        return generate_latest(self.registry)
