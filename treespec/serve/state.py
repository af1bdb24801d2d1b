"""The state that all requests of a server share, and its metrics in Prometheus' format."""

import time
from collections.abc import Callable, Sequence
from typing import final

from fastapi import Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from treespec.api.engine import Engine
from treespec.api.spec import Spec
from treespec.engine.output import Completion
from treespec.engine.request import Piece
from treespec.options import MAX_COUNT
from treespec.sampling.compiled_grammar import GrammarSandbox
from treespec.serve.admission import Admission
from treespec.serve.errors import ApiError
from treespec.serve.options import ServeConfig
from treespec.text import templates

COUNTER_METRICS: dict[str, tuple[str, list[str]]] = {  # name -> (help, labels)
    "requests": ("HTTP requests", ["path", "status"]),
    "answers": ("answers of the engine", ["end"]),
    "prompt_tokens": ("prompt tokens", []),
    "cached_prompt_tokens": ("prompt tokens not computed again", []),
    "completion_tokens": ("tokens of answers", []),
    "drafted_tokens": ("nodes of drafted trees", []),
    "accepted_tokens": ("drafted tokens that answers kept", []),
    "cycles": ("cycles of answers", []),
}
SECONDS_BUCKETS = [0.002 * 2**power for power in range(19)]  # up to 524
TAU_BUCKETS = [quarters / 4 for quarters in range(4, 41)]  # 1, 1.25, … 10
HISTOGRAM_METRICS = {  # name -> (help, buckets)
    "acceptance_length": ("tokens per cycle, by answer", TAU_BUCKETS),
    "cycle_seconds": ("seconds between an answer's cycles", SECONDS_BUCKETS),
    "first_token_seconds": ("seconds to the first tokens", SECONDS_BUCKETS),
    "answer_seconds": ("seconds of a whole answer", SECONDS_BUCKETS),
}


@final
class Metrics:
    """Counters and histograms of one server, in a registry of its own: a process may run several servers."""

    def __init__(self, engine: Engine) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        self.counts: dict[str, Counter] = {}
        for name, (help, labels) in COUNTER_METRICS.items():
            self.counts[name] = Counter(f"treespec_{name}", help, labels, registry=registry)
        self.times: dict[str, Histogram] = {}
        for name, (help, buckets) in HISTOGRAM_METRICS.items():
            histogram = Histogram(f"treespec_{name}", help, buckets=buckets, registry=registry)
            self.times[name] = histogram
        running = Gauge("treespec_running", "answers that are running", registry=registry)
        running.set_function(lambda: engine.running)
        waiting = Gauge("treespec_waiting", "answers that are waiting", registry=registry)
        waiting.set_function(lambda: engine.waiting)

    def watch(self) -> Callable[[Piece | None], None]:
        """Begin to time an answer. Returns a callback for each piece, and for None at the end."""
        started = time.perf_counter()
        latest: float | None = None

        def measure(piece: Piece | None) -> None:
            nonlocal latest
            now = time.perf_counter()
            if piece is None:
                self.times["answer_seconds"].observe(now - started)
            elif latest is None:
                self.times["first_token_seconds"].observe(now - started)
                latest = now
            elif not piece.drafted:  # the token that is sampled from the target ends a cycle
                self.times["cycle_seconds"].observe(now - latest)
                latest = now

        return measure

    def count(self, answer: Completion, done: bool) -> None:
        """Count an answer that has ended. done: False if it was cancelled."""
        stats = answer.stats
        end = "cancelled"
        if answer.error:
            end = "error"
        elif done:
            end = "done"
        self.counts["answers"].labels(end).inc()
        self.counts["prompt_tokens"].inc(stats.prompt_tokens)
        self.counts["cached_prompt_tokens"].inc(stats.cached_tokens)
        self.counts["completion_tokens"].inc(stats.new_tokens)
        self.counts["drafted_tokens"].inc(sum(stats.drafted))
        self.counts["accepted_tokens"].inc(sum(stats.accepted))
        self.counts["cycles"].inc(stats.cycles)
        if stats.cycles:
            self.times["acceptance_length"].observe(stats.acceptance_length)


@final
class State:
    """The state that all requests of a server share.

    Attributes:
        engine: decodes requests with `spec`.
        name: the model's name in requests and answers.
        admission: the places of the requests that are under way. It bounds them, so the engine's queue is unbounded.
        most_answers: the most answers of one caller that run and wait.
        ending: whether the server is shutting down.
        cut_off: whether running answers are being cut off.
        failure: why the engine answers no more, in words; None while it does.
        ends: ids of the tokens that end an answer.
        trial: compiles a grammar in another process, before the engine does.
    """

    def __init__(self, spec: Spec, config: ServeConfig, columns: int | None = None) -> None:
        self.spec = spec
        self.config = config
        self.keys = config.keys
        self.engine = Engine(spec, batch=config.batch, queue=MAX_COUNT, columns=columns)
        self.most_answers = config.batch + config.queue
        self.admission = Admission(self.most_answers, config.timeout)
        self.name = config.name or spec.name
        self.metrics = Metrics(self.engine)
        self.started = int(time.time())
        self.ending = False
        self.cut_off = False
        self.failure: str | None = None
        target = spec.target
        stops = templates.get_stops(spec.template)
        self.ends = target.eos | set(stops.token_ids)  # the tokens that end an answer
        self.trial = GrammarSandbox(target.tokenizer, target.vocab_size, self.ends)

    def check_model(self, named: str | None) -> None:
        """Raises ApiError if a request names another model. named: the request's field, or None."""
        if named is not None and named != self.name:
            message = f"The model `{named:.200}` does not exist; this server has `{self.name}`"
            raise ApiError(404, message, "model", "model_not_found")

    def cut(self) -> ApiError:
        """Build the 503 for a request that the shutdown or a dead engine refuses or cuts off."""
        message = self.failure or "the server shuts down"
        return ApiError(503, message, headers={"Retry-After": "10"})

    def build_timeout_error(self) -> ApiError:
        """Build the error of a request whose time is over: a 504 after --timeout, a 503 if it was cut off."""
        if self.cut_off:
            return self.cut()
        seconds = self.config.timeout
        return ApiError(504, f"the answer took longer than this server's limit of {seconds:g} s")

    def build_length_error(self, problem: str, param: str | None) -> ApiError:
        """Build the 400 for a prompt beyond the context, in OpenAI's words, which clients look for."""
        context = self.spec.target.context_length
        message = f"This model's maximum context length is {context} tokens. However, {problem}"
        return ApiError(400, message, param, "context_length_exceeded")

    def check_tokens(self, tokens: int, param: str) -> int:
        """Return the number of tokens. Raises ApiError if it exceeds this server's --max-tokens."""
        if tokens > self.config.max_tokens:
            message = f"{param} is {tokens}, this server's limit is {self.config.max_tokens}"
            raise ApiError(400, message, param)
        return tokens

    def check_prompt(self, ids: Sequence[int], param: str) -> None:
        """Raises ApiError for a prompt longer than the context or this server's --max-prompt."""
        limit = self.spec.target.context_length - 1
        if self.config.max_prompt is not None:
            limit = min(limit, self.config.max_prompt)
        if len(ids) > limit:
            problem = f"the prompt has {len(ids)} tokens, and this server takes {limit}: shorten it"
            raise self.build_length_error(problem, param)


def get_state(request: Request) -> State:
    """The state of the server that received a request."""
    state: State = request.app.state.treespec
    return state
