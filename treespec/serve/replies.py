"""What is sent back: choices as whole objects or as server-sent events, with usage and log-probabilities.

Both endpoints, whole or streamed, make the same deltas of choices; a whole response joins them.
"""

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate
from typing import Any, final

from fastapi.responses import StreamingResponse

from treespec.engine.request import Piece
from treespec.engine.stats import Stats
from treespec.serve.answers import Answers
from treespec.serve.errors import failed
from treespec.serve.tools import Catcher
from treespec.text.strings import INCOMPLETE, text_after

Fields = dict[str, Any]
LEAST = -9999.0  # OpenAI's logarithm of 0, which JSON has no number for


@final
@dataclass(frozen=True)
class Delta:
    """What is new of a choice. tokens: with log-probabilities, None where nobody asked for them.

    calls: of tools. end: why it ended. begins: whether it is the first of the choice. offset:
    characters of the choice's earlier tokens. ids: of its tokens, None where nobody asked for them.
    """

    index: int
    text: str | None = None
    tokens: list[Fields] | None = None
    calls: Sequence[Fields] = ()
    end: str | None = None
    begins: bool = False
    offset: int = 0
    ids: list[int] | None = None

    @property
    def told_ids(self) -> Fields:
        """The field that vLLM calls so."""
        return {} if self.ids is None else {"token_ids": self.ids}


def chat_choice(delta: Delta, whole: bool) -> Fields:
    """A delta as /v1/chat/completions streams it, or the whole choice."""
    written: Fields = {"role": "assistant", "refusal": None} if whole or delta.begins else {}
    if delta.text is not None:
        written["content"] = delta.text
    if delta.calls and whole:
        written |= {"content": (delta.text or "").strip() or None, "tool_calls": [*delta.calls]}
    elif delta.calls:
        written["tool_calls"] = [{"index": i} | call for i, call in enumerate(delta.calls)]
    told = None if delta.tokens is None else {"content": delta.tokens, "refusal": None}
    return {
        "index": delta.index,
        "message" if whole else "delta": written,
        "logprobs": told,
        "finish_reason": delta.end,
        **delta.told_ids,
    }


def text_choice(delta: Delta, whole: bool) -> Fields:
    """As `chat_choice`, for /v1/completions."""
    told: Fields | None = None
    if delta.tokens is not None:
        words = [token["token"] for token in delta.tokens]
        told = {
            "tokens": words,
            "token_logprobs": [token["logprob"] for token in delta.tokens],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in token["top_logprobs"]}
                for token in delta.tokens
            ],
            "text_offset": list(accumulate(map(len, words), initial=delta.offset))[:-1],
        }
    return {
        "index": delta.index,
        "text": delta.text or "",
        "logprobs": told,
        "finish_reason": delta.end,
        **delta.told_ids,
    }


@final
@dataclass
class Reply:
    """The response to a request, whose answers have been submitted.

    write: `chat_choice` or `text_choice`. names: of the whole object, a chunk, the id. opening: what
    the choices of each prompt begin with; None: nothing. catcher: makes one for each choice.
    counted: whether a stream tells its usage. numbered: whether
    token ids are told. hidden: tokens that are no part of the text, such as
    the end-of-sequence token.
    """

    answers: Answers
    write: Callable[[Delta, bool], Fields]
    names: tuple[str, str, str]
    opening: Sequence[str | None]
    catcher: Callable[[], Catcher]
    counted: bool
    numbered: bool
    hidden: frozenset[int]

    async def whole(self) -> Fields:
        choices: list[list[Delta]] = [[] for _ in self.answers.answers]
        async for delta in self._deltas():
            if delta:
                choices[delta.index].append(delta)
        written = [self.write(joined(deltas), True) for deltas in choices]
        return self._heading(0) | {"choices": written, "usage": self._usage()}

    async def chunks(self) -> AsyncIterator[Fields | None]:
        heading = self._heading(1) | ({"usage": None} if self.counted else {})
        async for delta in self._deltas():
            yield delta and heading | {"choices": [self.write(delta, False)]}
        if self.counted:
            yield heading | {"choices": [], "usage": self._usage()}

    def _heading(self, kind: int) -> Fields:
        """The fields that every object and chunk of one response begins with."""
        return {
            "id": f"{self.names[2]}-{uuid.uuid4().hex}",
            "object": self.names[kind],
            "created": int(time.time()),
            "model": self.answers.state.name,
            "system_fingerprint": f"treespec-{version('treespec')}",
        }

    async def _deltas(self) -> AsyncIterator[Delta | None]:
        """Deltas of all choices as they come; None where nothing came for a while."""
        # 1. The role of every choice, or the echo of its prompt.
        answers = self.answers
        tokenizer = self.answers.state.spec.target.tokenizer
        places = [index // answers.samples for index in range(len(answers.answers))]
        catchers = [self.catcher() for _ in places]
        offsets = [0] * len(places)
        before = [answers.prompts[place][-1] for place in places]
        for index, place in enumerate(places):
            if self.opening[place] is not None:
                yield Delta(index, self.opening[place], begins=True)

        # 2. Pieces as they come, and the end of each choice.
        async for arrival in answers:
            if arrival is None:
                yield None
                continue
            index, piece = arrival
            if piece:
                text = catchers[index].show(piece)
                tokens = told_of(tokenizer, piece, before[index], self.hidden)
                ids = piece.token_ids if self.numbered else None
                if text or tokens or ids:
                    yield Delta(index, text, tokens, offset=offsets[index], ids=ids)
                before[index] = piece.token_ids[-1]
                offsets[index] += sum(len(token["token"]) for token in tokens or ())
                continue
            rest, calls = catchers[index].finish()
            if rest or calls:
                yield Delta(index, rest or None, calls=[call.fields for call in calls])
            cut = answers.answers[index].stats.truncated
            yield Delta(index, end="tool_calls" if calls else "length" if cut else "stop")

    def _usage(self) -> Fields:
        """Token counts as OpenAI writes them, and what drafting brought. A prompt counts once."""
        total = Stats()
        answers = self.answers.answers
        for answer in answers:
            total.add(answer.stats)
        prompts = [answer.stats for answer in answers[:: self.answers.samples]]
        prompt = sum(stats.prompt_tokens for stats in prompts)
        accepted = sum(total.accepted)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": total.new_tokens,
            "total_tokens": prompt + total.new_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(stats.cached_tokens for stats in prompts)
            },
            "completion_tokens_details": {"accepted_prediction_tokens": accepted},
            "treespec": {
                "accepted_draft_tokens": accepted,
                "draft_tokens": sum(total.drafted),
                "cycles": total.cycles,
                "acceptance_length": round(total.acceptance_length, 4),
            },
        }


def joined(deltas: Sequence[Delta]) -> Delta:
    """A whole choice from its deltas."""
    told = [delta.tokens for delta in deltas if delta.tokens is not None]
    tokens = [token for tokens in told for token in tokens] if told else None
    text = "".join(delta.text or "" for delta in deltas)
    calls = [call for delta in deltas for call in delta.calls]
    numbers = [delta.ids for delta in deltas if delta.ids is not None]
    ids = [number for some in numbers for number in some] if numbers else None
    return Delta(deltas[-1].index, text, tokens, calls, deltas[-1].end, ids=ids)


def told_of(
    tokenizer: Any, piece: Piece, before: int, hidden: frozenset[int]
) -> list[Fields] | None:
    """The tokens of a piece as OpenAI's chats write them; None without log-probabilities.

    before: the token before the piece; the text of a token depends on it. A token that is part of a
    character has no bytes. Without a tokenizer its text is its id.
    """
    if piece.logprobs is None:
        return None

    def written(token: int, logprob: float) -> Fields:
        text = text_after(tokenizer, before, token) if tokenizer else f"token_id:{token}"
        content = None if INCOMPLETE in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": content}

    tokens = []
    for told in piece.logprobs:
        if told.token not in hidden:
            tops = [written(*likely) for likely in told.top]
            tokens.append(written(told.token, told.logprob) | {"top_logprobs": tops})
            before = told.token
    return tokens


def events(chunks: AsyncIterator[Fields | None]) -> StreamingResponse:
    """Chunks as server-sent events. None: a comment, so that nobody takes the line for dead.

    An error amid the answer is an event, too: the status has been sent.
    """

    def event(fields: Fields) -> bytes:
        return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"

    async def lines() -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks:
                yield b": waiting\n\n" if chunk is None else event(chunk)
        except Exception as error:
            yield event(failed(error).body)
        yield b"data: [DONE]\n\n"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the latter for nginx
    return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)
