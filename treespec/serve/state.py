"""What all requests of a server share."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from anyio import CapacityLimiter
from fastapi import Request

from treespec.api.engine import Engine
from treespec.api.spec import Spec
from treespec.serve.errors import ApiError
from treespec.serve.metrics import Metrics
from treespec.shaping.trial import Trial
from treespec.text import templates


@dataclass(frozen=True)
class Limits:
    """prompt: tokens; None is the context. tokens: of an answer. answers: of a request.

    body: bytes of a request. seconds: from the arrival of a request to the end of its answers.
    arrival: seconds in which headers and body must arrive.
    pages: answers on the page at a time; each has a cache of its own.
    """

    body: int = 4 << 20
    prompt: int | None = None
    tokens: int = 4096
    answers: int = 64
    seconds: float = 600.0
    arrival: float = 30.0
    pages: int = 2


@final
@dataclass
class State:
    """spec: what the engine decodes with. name: the model's, in requests and answers.

    api_key: one that requests must bring, or several; none: requests need none.
    temperature: of requests that name none. allow_lossy: whether the page may choose a lossy
    verifier. pages: answers on pages that run. ending: whether the server shuts down. cut_off:
    whether what still runs is cut off, too. compiling: lets one grammar be tried at a time.
    """

    spec: Spec
    engine: Engine
    name: str
    limits: Limits
    metrics: Metrics
    api_key: str | Sequence[str] | None = None
    temperature: float = 1.0
    started: int = field(default_factory=lambda: int(time.time()))
    allow_lossy: bool = False
    pages: int = 0
    ending: bool = False
    cut_off: bool = False
    # A text of a megabyte takes a second and hundreds of megabytes: few are tokenised at a time.
    tokenising: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(2))
    compiling: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(1))

    def __post_init__(self) -> None:
        """The process that tries the requests' grammars."""
        target, stops = self.spec.target, templates.stops(self.spec.template)
        self.trial = Trial(target.tokenizer, target.vocab_size, target.eos | set(stops.token_ids))

    @property
    def api_keys(self) -> Sequence[str]:
        return [self.api_key] if isinstance(self.api_key, str) else self.api_key or []

    def check_model(self, named: str | None) -> None:
        """Raises ApiError for another model's name."""
        if named is not None and named != self.name:
            raise ApiError(
                404,
                f"The model `{named:.200}` does not exist; this server has `{self.name}`",
                "model",
                "model_not_found",
            )

    def leave_page(self) -> None:
        """An answer on a page has ended."""
        self.pages -= 1

    def busy(self, message: str) -> ApiError:
        """The queue is full: when it makes sense to try again."""
        seconds = self.metrics.mean_seconds() * max(1, self.engine.waiting)
        headers = {"Retry-After": str(min(60, max(1, math.ceil(seconds))))}
        return ApiError(429, message, code="rate_limit_exceeded", headers=headers)

    def cut(self) -> ApiError:
        """Why answers were cut off that their client still waits for."""
        return ApiError(503, "the server shuts down", headers={"Retry-After": "10"})

    def check_answers(self, prompts: int, samples: int) -> None:
        """Raises ApiError for more answers than one request may ask for, or the engine holds."""
        most = min(self.limits.answers, self.engine.batch + self.engine.queue)
        if prompts * samples > most:
            asked = f"n is {samples}" + (f" for {prompts} prompts" if prompts > 1 else "")
            message = f"{asked}: this server's limit is {most} answers a request"
            raise ApiError(400, message, "n" if samples > 1 else "prompt")

    def check_tokens(self, tokens: int, param: str) -> None:
        """Raises ApiError for more tokens than this server lets an answer have."""
        if tokens > self.limits.tokens:
            message = f"{param} is {tokens}, this server's limit is {self.limits.tokens}"
            raise ApiError(400, message, param)

    def check_prompt(self, ids: Sequence[int], param: str) -> None:
        """Raises ApiError for a prompt beyond the context, or beyond this server's limit."""
        count, context, limit = len(ids), self.spec.target.context_length, self.limits.prompt
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
    name: str = getattr(request.state, "memory", "")
    return name


def state_of(request: Request) -> State:
    state: State = request.app.state.treespec
    return state
