"""What all requests of a server share."""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, final
from weakref import WeakSet

from anyio import CapacityLimiter
from fastapi import Request

from treespec.api.engine import Engine
from treespec.api.spec import Spec
from treespec.serve.errors import ApiError
from treespec.serve.metrics import Metrics
from treespec.serve.options import ServeConfig
from treespec.shaping.trial import Trial
from treespec.text import templates


@final
class State:
    """engine: decodes requests with `spec`. name: the model's, in requests and answers.

    pages: the cycles of answers on pages that run. ending: whether the server shuts down. cut_off: whether what
    still runs is cut off, too. tokenising: few texts at a time, as one of a megabyte takes a second
    and hundreds of megabytes. compiling: one grammar at a time.
    """

    def __init__(self, spec: Spec, config: ServeConfig, columns: int | None = None) -> None:
        self.spec, self.config, self.keys = spec, config, config.keys
        self.engine = Engine(spec, batch=config.batch, queue=config.queue, columns=columns)
        self.name = config.name or spec.name
        self.metrics, self.started = Metrics(self.engine), int(time.time())
        self.pages: WeakSet[Iterator[Any]] = WeakSet()
        self.ending = self.cut_off = False
        self.tokenising, self.compiling = CapacityLimiter(2), CapacityLimiter(1)
        target, stops = spec.target, templates.stops(spec.template)
        self.ends = target.eos | set(stops.token_ids)  # the tokens that end an answer
        self.trial = Trial(target.tokenizer, target.vocab_size, self.ends)

    def check_model(self, named: str | None) -> None:
        """Raises ApiError for another model's name."""
        if named is not None and named != self.name:
            message = f"The model `{named:.200}` does not exist; this server has `{self.name}`"
            raise ApiError(404, message, "model", "model_not_found")

    def busy(self, message: str) -> ApiError:
        """The queue is full: when it makes sense to try again."""
        seconds = self.metrics.mean_seconds() * max(1, self.engine.waiting)
        headers = {"Retry-After": str(min(60, max(1, math.ceil(seconds))))}
        return ApiError(429, message, code="rate_limit_exceeded", headers=headers)

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
        count, context, limit = len(ids), self.spec.target.context_length, self.config.max_prompt
        if count >= context:
            room = f"the model's context holds {context} with the answer"
        elif limit is not None and count > limit:
            room = f"this server takes {limit}"
        else:
            return
        message = f"the prompt has {count} tokens, {room}: shorten it"
        raise ApiError(400, message, param, "context_length_exceeded")


def memory_of(request: Request) -> str:
    """The name of the answers that a request may be drafted from: those to the same key.

    The guard has set it. Without keys all requests share one.
    """
    name: str = request.scope.get("treespec.memory", "")
    return name


def state_of(request: Request) -> State:
    state: State = request.app.state.treespec
    return state
