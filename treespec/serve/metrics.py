"""Counts and times of a server in Prometheus' format."""

import time
from collections.abc import Callable, Sequence
from typing import final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from treespec.api.engine import Engine
from treespec.decoding.sequence import Piece
from treespec.requests.output import Completion

TAUS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10)
SHORT = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@final
class Metrics:
    """Its own registry, so that one process may hold several servers."""

    def __init__(self, engine: Engine) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"treespec_{name}", help, labels, registry=registry)

        def histogram(name: str, help: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"treespec_{name}", help, buckets=buckets, registry=registry)

        # 1. Counters.
        self.requests = counter("requests", "HTTP requests", "path", "status")
        self.answers = counter("answers", "answers of the engine", "end")
        self.prompt_tokens = counter("prompt_tokens", "prompt tokens")
        self.cached_tokens = counter("cached_prompt_tokens", "prompt tokens not computed again")
        self.tokens = counter("completion_tokens", "tokens of answers")
        self.drafted = counter("drafted_tokens", "nodes of drafted trees")
        self.accepted = counter("accepted_tokens", "drafted tokens that answers kept")
        self.cycles = counter("cycles", "cycles of answers")

        # 2. Histograms.
        self.tau = histogram("acceptance_length", "tokens per cycle, by answer", TAUS)
        self.cycle = histogram("cycle_seconds", "seconds between an answer's cycles", SHORT)
        self.first = histogram("first_token_seconds", "seconds to the first tokens", LONG)
        self.whole = histogram("answer_seconds", "seconds of a whole answer", LONG)

        # 3. What the engine says of itself.
        for name, value in (
            ("running", lambda: engine.running),
            ("waiting", lambda: engine.waiting),
        ):
            gauge = Gauge(f"treespec_{name}", f"answers that are {name}", registry=registry)
            gauge.set_function(value)

    def watch(self) -> Callable[[Piece | None], None]:
        """Times one answer from now on. The engine's thread calls the result for every piece."""
        started = latest = time.perf_counter()
        pieces = 0

        def seen(piece: Piece | None) -> None:
            nonlocal latest, pieces
            now = time.perf_counter()
            pieces += 1
            if piece is None:
                self.whole.observe(now - started)
                return
            if pieces == 1:
                self.first.observe(now - started)
                latest = now
            elif not piece.drafted:  # the target's own token ends a cycle
                self.cycle.observe(now - latest)
                latest = now

        return seen

    def count(self, answer: Completion, done: bool) -> None:
        """Add an answer that has ended. done: False for one that was cut off."""
        stats = answer.stats
        self.answers.labels("error" if answer.error else "done" if done else "cancelled").inc()
        self.prompt_tokens.inc(stats.prompt_tokens)
        self.cached_tokens.inc(stats.cached_tokens)
        self.tokens.inc(stats.new_tokens)
        self.drafted.inc(sum(stats.drafted))
        self.accepted.inc(sum(stats.accepted))
        self.cycles.inc(stats.cycles)
        if stats.cycles:
            self.tau.observe(stats.acceptance_length)

    def mean_seconds(self) -> float:
        """Mean seconds of the answers so far; 1 before the first."""
        count = self.registry.get_sample_value("treespec_answer_seconds_count")
        total = self.registry.get_sample_value("treespec_answer_seconds_sum")
        return total / count if total and count else 1.0

    def text(self) -> bytes:
        return generate_latest(self.registry)
