"""What is sent back: choices as whole objects or as server-sent events, with usage and the reason of the end.

Both endpoints, whole or streamed, make the same chunks of choices; a whole response joins them.
"""

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar, final

from fastapi import Response
from fastapi.responses import JSONResponse, StreamingResponse

from treespec.decoding.sequence import Piece
from treespec.decoding.stats import Stats
from treespec.requests.output import Completion
from treespec.serve.answers import Answers
from treespec.serve.errors import ApiError, failed
from treespec.serve.logprobs import joined
from treespec.serve.schema import Sampled
from treespec.serve.state import State
from treespec.serve.tools import Call, Catcher

Fields = dict[str, Any]


@final
@dataclass(frozen=True)
class Part:
    """One of the choices. begin: its first chunk, or None. logprobs: of a piece."""

    answer: Completion
    catcher: Catcher
    logprobs: Callable[[Piece], Fields | None]
    begin: Any = None


@dataclass
class Reply:
    """The response of /v1/completions. parts: the choices. prompts: how many they answer."""

    state: State
    asked: Sampled
    answers: Answers
    parts: list[Part]
    prompts: int = 1

    names: ClassVar = (
        "text_completion",
        "text_completion",
        "cmpl",
    )  # of the object, a chunk, the id
    content: ClassVar = "text"  # the field of a chunk that holds its part of the choice
    nothing: ClassVar[Any] = ""  # what that field holds in the last chunk

    def delta(self, text: str) -> Any:
        return text

    def whole(self, text: str, chunks: Sequence[Fields]) -> Fields:
        """The content of a whole choice."""
        return {"text": text}

    async def send(self) -> Response:
        if self.asked.stream:
            return events(self._chunks())
        choices: list[list[Fields]] = [[] for _ in self.parts]
        async for choice in self._choices():
            if choice is not None:
                choices[choice["index"]].append(choice)
        fields = self._heading(self.names[0]) | {"choices": [*map(self._joined, choices)]}
        return JSONResponse(fields | {"usage": usage(self.answers.answers, self.prompts)})

    async def _chunks(self) -> AsyncIterator[Fields | None]:
        fields = self._heading(self.names[1])
        fields |= {"usage": None} if self.asked.counted else {}
        async for choice in self._choices():
            yield choice and fields | {"choices": [choice]}
        if self.asked.counted:
            counts = usage(self.answers.answers, self.prompts)
            yield fields | {"choices": [], "usage": counts}

    def _heading(self, kind: str) -> Fields:
        """The fields that every object and chunk of one response begins with."""
        return {
            "id": f"{self.names[2]}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.state.name,
            "system_fingerprint": f"treespec-{version('treespec')}",
        }

    async def _choices(self) -> AsyncIterator[Fields | None]:
        """Chunks of all choices as they come; None where nothing came for a while."""

        def chunk(number: int, delta: Any, told: Any = None, end: str | None = None) -> Fields:
            fields = {"index": number, self.content: delta, "logprobs": told}
            return fields | {"finish_reason": end}

        # 1. The role of every choice, or the echo of its prompt.
        for number, part in enumerate(self.parts):
            if part.begin:
                yield chunk(number, part.begin)

        # 2. Pieces as they come, and the end of each choice.
        async for arrival in self.answers:
            if arrival is None:
                yield None
                continue
            number, piece = arrival
            part = self.parts[number]
            if piece:
                text, told = part.catcher.show(piece), part.logprobs(piece)
                if text or told:
                    yield chunk(number, self.delta(text), told)
                continue
            rest, calls = part.catcher.finish()
            if rest:
                yield chunk(number, self.delta(rest))
            for place, call in enumerate(calls):
                yield chunk(number, {"tool_calls": [{"index": place} | call_fields(call)]})
            end = "length" if part.answer.stats.truncated else "stop"
            yield chunk(number, self.nothing, end="tool_calls" if calls else end)

    def _joined(self, chunks: Sequence[Fields]) -> Fields:
        """One choice from its chunks."""
        deltas = [chunk[self.content] for chunk in chunks]
        texts = [delta if isinstance(delta, str) else delta.get("content", "") for delta in deltas]
        told = joined([chunk["logprobs"] for chunk in chunks])
        fields = {"index": chunks[-1]["index"]} | self.whole("".join(texts), chunks)
        return fields | {"logprobs": told, "finish_reason": chunks[-1]["finish_reason"]}


@final
class ChatReply(Reply):
    """The response of /v1/chat/completions."""

    names: ClassVar = ("chat.completion", "chat.completion.chunk", "chatcmpl")
    content: ClassVar = "delta"

    nothing: ClassVar[Any] = {}

    def delta(self, text: str) -> Any:
        return {"content": text}

    def whole(self, text: str, chunks: Sequence[Fields]) -> Fields:
        calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
        message: Fields = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            for call in calls:
                del call["index"]
            message |= {"content": text.strip() or None, "tool_calls": calls}
        return {"message": message}


def usage(answers: Sequence[Completion], prompts: int = 1) -> Fields:
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


def call_fields(call: Call) -> Fields:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


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
            yield event(told.body)
        yield b"data: [DONE]\n\n"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the latter for nginx
    return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)


def event(fields: Fields) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"
