"""The parts that all answers on the wire have: names, usage, the reason of the end, events."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import version
from typing import Any

from fastapi.responses import StreamingResponse

from treespec.decoding.stats import Stats
from treespec.requests.output import Answer
from treespec.serve.errors import ApiError, body_of, failed
from treespec.serve.logprobs import Told
from treespec.serve.state import State
from treespec.text import templates

Fields = dict[str, Any]


def heading(state: State, kind: str, prefix: str) -> Fields:
    """The fields that every object and chunk of one response begins with."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": state.name,
        "system_fingerprint": f"treespec-{version('treespec')}",
    }


def usage(answers: Sequence[Answer], prompts: int = 1) -> Fields:
    """Token counts of a request as OpenAI writes them, and what drafting brought.

    prompts: how many the answers share; samples of one prompt count it once.
    """
    total, samples = Stats(), max(1, len(answers) // prompts)
    for answer in answers:
        total.add(answer.stats)
    prompt = sum(answer.stats.prompt_tokens for answer in answers[::samples])
    cached = sum(answer.stats.cached_tokens for answer in answers[::samples])
    accepted = sum(total.accepted)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": total.new_tokens,
        "total_tokens": prompt + total.new_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"accepted_prediction_tokens": accepted},
        "treespec": {
            "accepted_draft_tokens": accepted,
            "draft_tokens": sum(total.drafted),
            "cycles": total.cycles,
            "acceptance_length": round(total.acceptance_length, 4),
        },
    }


def end_of(state: State, answer: Answer, options: Fields) -> str:
    """`length` where the answer reached its limit or the context's end, otherwise `stop`."""
    # 1. A shorter answer ended by itself.
    output, spec = answer.output, state.spec
    room = spec.target.context_length - answer.stats.prompt_tokens
    tokens = output.token_ids
    if len(tokens) < min(options["max_new_tokens"], room):
        return "stop"

    # 2. One of full length may still end with an end-of-sequence token or a stop string.
    own, tokenizer = templates.stops(spec.template), spec.target.tokenizer
    if tokens and tokens[-1] in ends_of(state, options):
        return "stop"
    if tokenizer is None or not (own.strings or options.get("stop")):
        return "length"
    plain: Any = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    cut = len(output.text) < len(str(tokenizer.decode(tokens, **plain)))
    last = tokenizer.decode(tokens[-1:], clean_up_tokenization_spaces=False)
    return "stop" if cut or last in options.get("stop", ()) else "length"


def ends_of(state: State, options: Fields) -> frozenset[int]:
    """The tokens that end an answer by themselves."""
    if options.get("ignore_eos"):
        return frozenset()
    spec = state.spec
    return spec.target.eos | set(templates.stops(spec.template).token_ids)


def told_of(state: State, options: Fields, prompt: Sequence[int], offset: int = 0) -> Told:
    """The log-probabilities of one answer. offset: characters of an echo before it."""
    return Told(state.spec.target.tokenizer, prompt[-1], ends_of(state, options), offset)


def events(chunks: AsyncIterator[Fields | None]) -> StreamingResponse:
    """Chunks as server-sent events. None: a comment, so that nobody takes the line for dead.

    An error amid the answer is an event, too: the status has been sent.
    """

    async def lines() -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks:
                yield b": waiting\n\n" if chunk is None else event(chunk)
        except Exception as error:
            told = error if isinstance(error, ApiError) else failed(error)
            yield event(body_of(told.status_code, str(told.detail), told.param, told.code))
        yield b"data: [DONE]\n\n"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the latter for nginx
    return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)


def event(fields: Fields) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"
