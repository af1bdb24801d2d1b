"""Write the response to a request: one JSON object, or server-sent events as the answers arrive."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from fastapi.responses import StreamingResponse

from treespec.engine.request import Piece
from treespec.engine.stats import Stats
from treespec.files.distribution import find_version
from treespec.files.pauses import take_pause
from treespec.serve.answers import Answers
from treespec.serve.errors import to_api_error
from treespec.serve.protocol import AnswerDelta, Fields, format_logprobs, merge_deltas
from treespec.serve.thoughts import ThoughtFormat
from treespec.serve.tools import AnswerParser, Parts


@final
@dataclass(frozen=True)
class ReplyFormat:
    """How an endpoint writes its response.

    Attributes:
        build_choice: builds the fields of a choice from a delta, and from whether the delta is the whole choice.
        object_name: value of the field `object` in a whole response.
        chunk_name: value of the field `object` in a chunk of a stream.
        id_prefix: first part of a response's id.
        openings: for each prompt, the text of the first delta of its choices; None sends no such delta.
        build_parser: builds the parser of one choice from the token ids of its prompt.
        thoughts: the format of thoughts, after which a grammar begins. Default: None, there are none.
        prompt_tokens: described tokens of each prompt, which its opening tells. Default: None, none.
    """

    build_choice: Callable[[AnswerDelta, bool], Fields]
    object_name: str
    chunk_name: str
    id_prefix: str
    openings: Sequence[str | None]
    build_parser: Callable[[Sequence[int]], AnswerParser]
    thoughts: ThoughtFormat | None = None
    prompt_tokens: Sequence[list[Fields]] | None = None


@final
@dataclass
class ChoiceStream:
    """Converts the pieces of one answer to deltas of its choice.

    Attributes:
        index: index of the choice.
        parser: splits the text into thoughts, shown text and tool calls.
        tokenizer: decodes tokens for their log-probabilities; None if the target has none.
        hidden_tokens: ids of tokens that are no part of the text, such as the end-of-sequence token.
        return_token_ids: whether deltas hold token ids.
        previous_token: id of the token before the next piece.
        offset: number of characters of the tokens so far.
        call_count: number of tool calls so far.
    """

    index: int
    parser: AnswerParser
    tokenizer: Any
    hidden_tokens: frozenset[int]
    return_token_ids: bool
    previous_token: int
    offset: int = 0
    call_count: int = 0

    def add_piece(self, piece: Piece) -> AnswerDelta | None:
        """Convert a piece to a delta; None if there is nothing to show yet."""
        parts = self.parser.add(piece)
        tokens = format_logprobs(self.tokenizer, piece, self.previous_token, self.hidden_tokens)
        ids = None
        if self.return_token_ids:
            ids = piece.token_ids
        delta = None
        if parts or tokens or ids:
            delta = self._build_delta(parts, parts.text, tokens, ids)
        self.previous_token = piece.token_ids[-1]
        for token in tokens or []:
            self.offset += len(token["token"])
        return delta

    def finish(self, truncated: bool) -> list[AnswerDelta]:
        """Build the last deltas: text that was held back, tool calls, and the finish reason.

        truncated: whether a token limit ended the answer.
        """
        deltas = []
        parts = self.parser.finish()
        if parts:
            deltas.append(self._build_delta(parts, parts.text or None))
        reason = "stop"
        if self.call_count:
            reason = "tool_calls"
        elif truncated:
            reason = "length"
        deltas.append(AnswerDelta(self.index, end=reason))
        return deltas

    def _build_delta(
        self,
        parts: Parts,
        text: str | None,
        tokens: list[Fields] | None = None,
        ids: list[int] | None = None,
    ) -> AnswerDelta:
        """Build the delta of parts. text: theirs, or None for a delta without the field."""
        calls = [call.to_fields(self.parser.id_pattern) for call in parts.calls]
        delta = AnswerDelta(
            self.index,
            text,
            thought=parts.thought,
            tokens=tokens,
            calls=calls,
            first_call=self.call_count,
            offset=self.offset,
            ids=ids,
        )
        self.call_count += len(calls)
        return delta


@final
@dataclass
class Reply:
    """The response to a request whose answers have been submitted.

    Attributes:
        answers: the submitted answers.
        format: how the endpoint writes its response.
        include_usage: whether a stream ends with a chunk of token counts.
        return_token_ids: whether choices hold their token ids.
        hidden_tokens: ids of tokens that are no part of the text, such as the end-of-sequence token.
    """

    answers: Answers
    format: ReplyFormat
    include_usage: bool
    return_token_ids: bool
    hidden_tokens: frozenset[int]

    async def collect_reply(self) -> Fields:
        """Wait for all answers, and build the response as one object."""
        return self.build_reply(await self.collect_deltas())

    async def collect_deltas(self) -> list[list[AnswerDelta]]:
        """Wait for all answers. Returns the deltas of each choice."""
        deltas_by_choice: list[list[AnswerDelta]] = [[] for _ in self.answers.answers]
        async for delta in self._stream_deltas():
            if delta is not None:
                deltas_by_choice[delta.index].append(delta)
        return deltas_by_choice

    def build_reply(self, deltas_by_choice: Sequence[Sequence[AnswerDelta]]) -> Fields:
        """Build the response as one object, from the deltas of each choice."""
        choices = []
        for deltas in deltas_by_choice:
            take_pause()
            choices.append(self.format.build_choice(merge_deltas(deltas), True))
        heading = self._build_heading(self.format.object_name)
        return heading | {"choices": choices, "usage": self._count_usage()}

    async def stream_chunks(self) -> AsyncIterator[Fields | None]:
        """Yield the chunks of a stream, and None after `QUIET_SECONDS` without one."""
        heading = self._build_heading(self.format.chunk_name)
        if self.include_usage:
            heading["usage"] = None
        async for delta in self._stream_deltas():
            if delta is None:
                yield None
            else:
                yield heading | {"choices": [self.format.build_choice(delta, False)]}
        if self.include_usage:
            yield heading | {"choices": [], "usage": self._count_usage()}

    def _build_heading(self, object_name: str) -> Fields:
        """Build the fields that all chunks of a response, or its one object, share."""
        return {
            "id": f"{self.format.id_prefix}-{uuid.uuid4().hex}",
            "object": object_name,
            "created": int(time.time()),
            "model": self.answers.state.name,
            "system_fingerprint": f"treespec-{find_version()}",
        }

    async def _stream_deltas(self) -> AsyncIterator[AnswerDelta | None]:
        """Yield the deltas of all choices as they arrive, and None after `QUIET_SECONDS` without one."""
        # 1. Begin each choice with its role, or with the echo of its prompt.
        choices = []
        for index in range(len(self.answers.answers)):
            prompt_index = index // self.answers.samples
            choices.append(self._open_choice(index, prompt_index))
            opening = self.format.openings[prompt_index]
            if opening is not None:
                tokens = None
                if self.format.prompt_tokens is not None:
                    tokens = self.format.prompt_tokens[prompt_index]
                for token in tokens or []:
                    choices[index].offset += len(token["token"])
                yield AnswerDelta(index, opening, tokens=tokens, begins=True)

        # 2. Yield the pieces, and the end of each choice.
        async for arrival in self.answers:
            if arrival is None:
                yield None
                continue
            index, piece = arrival
            if piece is not None:
                delta = choices[index].add_piece(piece)
                if delta is not None:
                    yield delta
                continue
            for delta in choices[index].finish(self.answers.answers[index].stats.truncated):
                yield delta

    def _open_choice(self, index: int, prompt_index: int) -> ChoiceStream:
        """Build the stream of a choice. prompt_index: index of the prompt that it answers."""
        return ChoiceStream(
            index,
            self.format.build_parser(self.answers.prompts[prompt_index]),
            self.answers.state.spec.target.tokenizer,
            self.hidden_tokens,
            self.return_token_ids,
            previous_token=self.answers.prompts[prompt_index][-1],
        )

    def _count_usage(self) -> Fields:
        """Count tokens as OpenAI does, with the counts of drafts; a prompt with several answers counts once."""
        total = Stats()
        answers = self.answers.answers
        for answer in answers:
            total.add(answer.stats)
        prompt_tokens = 0
        cached_tokens = 0
        for answer in answers[:: self.answers.samples]:
            prompt_tokens += answer.stats.prompt_tokens
            cached_tokens += answer.stats.cached_tokens
        accepted = sum(total.accepted)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": total.new_tokens,
            "total_tokens": prompt_tokens + total.new_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
            "completion_tokens_details": {"accepted_prediction_tokens": accepted},
            "treespec": {
                "accepted_draft_tokens": accepted,
                "draft_tokens": sum(total.drafted),
                "cycles": total.cycles,
                "acceptance_length": round(total.acceptance_length, 4),
            },
        }


def stream_events(chunks: AsyncIterator[Fields | None]) -> StreamingResponse:
    """Send chunks as server-sent events.

    None is sent as a comment, so that clients and proxies do not time out. An error during the answer is sent as an
    event, since the status has been sent already.
    """

    async def lines() -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks:
                if chunk is None:
                    yield b": waiting\n\n"
                else:
                    yield format_event(chunk)
        except Exception as error:
            yield format_event(to_api_error(error).body)
        yield b"data: [DONE]\n\n"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the latter for nginx
    return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)


def format_event(fields: Fields) -> bytes:
    """Format a JSON object as a server-sent event; those of the Responses API have their type as its name."""
    name = b""
    if "sequence_number" in fields:
        name = b"event: " + fields["type"].encode() + b"\n"
    return name + b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"
