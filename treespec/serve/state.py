"""What all requests of a server share; counts and times in Prometheus' format."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, final
from weakref import WeakSet

from anyio import CapacityLimiter
from fastapi import Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from treespec.api.engine import Engine
from treespec.api.spec import Spec
from treespec.engine.output import Completion
from treespec.engine.request import Piece
from treespec.sampling.compiled_grammar import Trial
from treespec.serve.errors import ApiError
from treespec.serve.options import ServeConfig
from treespec.text import templates

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
SECONDS = [0.002 * 2**power for power in range(19)]  # up to 524
TAUS = [quarters / 4 for quarters in range(4, 41)]  # 1, 1.25, … 10
HISTOGRAMS = {  # what each measures, and its buckets
    "acceptance_length": ("tokens per cycle, by answer", TAUS),
    "cycle_seconds": ("seconds between an answer's cycles", SECONDS),
    "first_token_seconds": ("seconds to the first tokens", SECONDS),
    "answer_seconds": ("seconds of a whole answer", SECONDS),
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
        started = time.perf_counter()
        latest: float | None = None

        def seen(piece: Piece | None) -> None:
            nonlocal latest
            now = time.perf_counter()
            if piece is None:
                self.times["answer_seconds"].observe(now - started)
            elif latest is None:
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


@final
class State:
    """engine: decodes requests with `spec`. name: the model's, in requests and answers.

    pages: the cycles of answers on pages that run. ending: whether the server shuts down. cut_off: whether what
    still runs is cut off, too. tokenising: few texts at a time, as one of a megabyte takes a second
    and hundreds of megabytes. compiling: one grammar at a time.
    """

    def __init__(self, spec: Spec, config: ServeConfig, columns: int | None = None) -> None:
        self.spec = spec
        self.config = config
        self.keys = config.keys
        self.engine = Engine(spec, batch=config.batch, queue=config.queue, columns=columns)
        self.name = config.name or spec.name
        self.metrics, self.started = Metrics(self.engine), int(time.time())
        self.pages: WeakSet[Iterator[Any]] = WeakSet()
        self.ending = self.cut_off = False
        self.tokenising, self.compiling = CapacityLimiter(2), CapacityLimiter(1)
        target = spec.target
        stops = templates.stops(spec.template)
        self.ends = target.eos | set(stops.token_ids)  # the tokens that end an answer
        self.trial = Trial(target.tokenizer, target.vocab_size, self.ends)

    def check_model(self, named: str | None) -> None:
        """Raises ApiError for another model's name."""
        if named is not None and named != self.name:
            message = f"The model `{named:.200}` does not exist; this server has `{self.name}`"
            raise ApiError(404, message, "model", "model_not_found")

    def busy(self, message: str) -> ApiError:
        """The queue is full: an answer takes seconds."""
        return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "5"})

    def cut(self) -> ApiError:
        """Why answers were cut off that their client still waits for."""
        return ApiError(503, "the server shuts down", headers={"Retry-After": "10"})

    def late(self) -> ApiError:
        seconds = self.config.timeout
        return ApiError(504, f"the answer took longer than this server's limit of {seconds:g} s")

    def check_tokens(self, tokens: int, param: str) -> int:
        """The number itself. Raises ApiError for more than this server lets an answer have."""
        if tokens > self.config.max_tokens:
            message = f"{param} is {tokens}, this server's limit is {self.config.max_tokens}"
            raise ApiError(400, message, param)
        return tokens

    def check_prompt(self, ids: Sequence[int], param: str) -> None:
        """Raises ApiError for a prompt beyond the context, or beyond this server's limit."""
        most = self.spec.target.context_length - 1
        most = min(most, most if self.config.max_prompt is None else self.config.max_prompt)
        if len(ids) > most:
            message = f"the prompt has {len(ids)} tokens, this server takes {most}: shorten it"
            raise ApiError(400, message, param, "context_length_exceeded")


def state_of(request: Request) -> State:
    state: State = request.app.state.treespec
    return state
