"""The options of `Spec.generate` that a request asks for, in treespec's names."""

from collections.abc import Sequence
from typing import Any

from treespec.serve.errors import ApiError
from treespec.serve.schema import ChatRequest, CompletionRequest, ResponseFormat, Sampled
from treespec.serve.state import State

SAME = (  # fields that an option has the name and the meaning of
    *("temperature", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "min_tokens", "ignore_eos", "regex", "grammar"),
)
COMPLETION_TOKENS = 16  # of /v1/completions without max_tokens, as OpenAI's


def options_of(state: State, request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    """The options of one answer, without its seed. Raises ApiError for a limit of the server."""
    # 1. Limits.
    limits = state.limits
    name, tokens = most_tokens(request)
    if tokens is not None and tokens > limits.tokens:
        raise ApiError(400, f"{name} is {tokens}, this server's limit is {limits.tokens}", name)
    if tokens is None:
        chat = isinstance(request, ChatRequest)
        tokens = limits.tokens if chat else min(COMPLETION_TOKENS, limits.tokens)
    if request.min_tokens is not None and request.min_tokens > tokens:
        message = f"min_tokens is {request.min_tokens}, beyond the {tokens} of {name}"
        raise ApiError(400, message, "min_tokens")

    # 2. Options under the same name, then the others. What is absent is treespec's default.
    options: dict[str, Any] = {"temperature": state.temperature, "max_new_tokens": tokens}
    given = {field: getattr(request, field) for field in SAME}
    options |= {field: value for field, value in given.items() if value is not None}
    if request.top_k is not None:
        options["top_k"] = max(request.top_k, 0)  # -1 is off in other servers
    if request.logit_bias:
        options["logit_bias"] = {int(token): bias for token, bias in request.logit_bias.items()}
    if (likeliest := logprobs_of(request)) is not None:
        options |= {"logprobs": True, "top_logprobs": likeliest}
    if isinstance(request, ChatRequest) and request.response_format:
        options |= _format(request.response_format)
    return options


def fit_default(
    state: State,
    request: ChatRequest | CompletionRequest,
    options: dict[str, Any],
    prompts: Sequence[Sequence[int]],
) -> None:
    """Lower the limit of an answer whose request names none, so that the engine's memory holds it.

    Changes `options`.
    """
    columns = state.engine.columns
    if columns is not None and most_tokens(request)[1] is None:
        room = columns - max(len(prompt) for prompt in prompts)
        options["max_new_tokens"] = max(1, min(options["max_new_tokens"], room))


def most_tokens(request: Sampled) -> tuple[str, int | None]:
    """The field that limits the answer, and its value."""
    newer = "max_completion_tokens"  # OpenAI's name since 2024
    if (value := getattr(request, newer, None)) is not None:
        return newer, value
    return "max_tokens", request.max_tokens


def logprobs_of(request: ChatRequest | CompletionRequest) -> int | None:
    """Likeliest tokens to name at each place; 0: the answer's own alone. None: no probabilities."""
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _format(wanted: ResponseFormat) -> dict[str, Any]:
    if wanted.type == "json_object":
        return {"json_schema": {"type": "object"}}
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            name = "response_format.json_schema"
            raise ApiError(400, f"Missing required parameter: '{name}'", name)
        return {"json_schema": wanted.json_schema.json_schema}
    return {}
