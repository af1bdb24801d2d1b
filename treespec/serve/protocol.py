"""Write responses in the fields of OpenAI's API: choices, whole or as deltas, and their log-probabilities.

Both endpoints build `AnswerDelta`s, streamed or not; a response that is not streamed merges the deltas of each choice.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

from treespec.engine.request import Piece, TokenLogprob
from treespec.files.pauses import take_pause
from treespec.text.strings import INCOMPLETE_CHARACTER, decode_after

Fields = dict[str, Any]
MIN_LOGPROB = -9999.0  # OpenAI's value for log 0, which JSON cannot write


@final
@dataclass(frozen=True)
class AnswerDelta:
    """What one event of a stream adds to a choice.

    Attributes:
        index: index of the choice.
        text: new text; None if there is none.
        thought: new text of the thought; None if there is none.
        tokens: new tokens with their log-probabilities; None unless the request asks for them.
        calls: tool calls.
        first_call: number of the choice's earlier calls.
        end: finish reason; None before the end.
        begins: whether this is the first delta of the choice.
        offset: number of characters of the choice's earlier tokens.
        ids: new token ids; None unless the request asks for them.
    """

    index: int
    text: str | None = None
    thought: str | None = None
    tokens: list[Fields] | None = None
    calls: Sequence[Fields] = ()
    first_call: int = 0
    end: str | None = None
    begins: bool = False
    offset: int = 0
    ids: list[int] | None = None

    @property
    def told_ids(self) -> Fields:
        """The token ids in vLLM's field `token_ids`; {} unless the request asks for them."""
        if self.ids is None:
            return {}
        return {"token_ids": self.ids}


def build_chat_choice(delta: AnswerDelta, whole: bool) -> Fields:
    """Build the fields of a choice of /v1/chat/completions. whole: not streamed, so `delta` is the whole choice."""
    logprobs: Fields | None = None
    if delta.tokens is not None:
        logprobs = {"content": delta.tokens, "refusal": None}
    return {
        "index": delta.index,
        "message" if whole else "delta": build_chat_message(delta, whole),
        "logprobs": logprobs,
        "finish_reason": delta.end,
        **delta.told_ids,
    }


def build_chat_message(delta: AnswerDelta, whole: bool) -> Fields:
    """Build the fields of a message, or of what a delta adds to it. whole: as for `build_chat_choice`."""
    message: Fields = {}
    if whole or delta.begins:
        message = {"role": "assistant", "refusal": None}
    if delta.text is not None:
        message["content"] = delta.text
    if delta.thought:
        message["reasoning_content"] = delta.thought
    if delta.calls and whole:
        text = delta.text or ""
        message["content"] = text.strip() or None
        message["tool_calls"] = list(delta.calls)
    elif delta.calls:
        first = delta.first_call
        message["tool_calls"] = [{"index": i} | call for i, call in enumerate(delta.calls, first)]
    return message


def build_text_choice(delta: AnswerDelta, whole: bool) -> Fields:
    """Build the fields of a choice of /v1/completions, which are the same streamed or whole."""
    logprobs: Fields | None = None
    if delta.tokens is not None:
        logprobs = build_text_logprobs(delta.tokens, delta.offset)
    return {
        "index": delta.index,
        "text": delta.text or "",
        "logprobs": logprobs,
        "finish_reason": delta.end,
        **delta.told_ids,
    }


def build_text_logprobs(tokens: Sequence[Fields], offset: int) -> Fields:
    """Convert log-probabilities from the chat format to the parallel lists of /v1/completions.

    Tokens `Hel`, `lo` and `!` after an offset of 5 characters:

        tokens       Hel  lo  !
        text_offset  5    8   10

    Args:
        tokens: tokens in the chat format.
        offset: number of characters of the choice before these tokens.
    """
    logprobs: Fields = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        logprobs["tokens"].append(token["token"])
        logprobs["token_logprobs"].append(token["logprob"])
        tops: dict[str, float] | None = None
        if token["top_logprobs"] is not None:  # the first token of a prompt has none
            tops = {}
            for top in token[
                "top_logprobs"
            ]:  # of tokens with the same text the most likely is told
                tops.setdefault(top["token"], top["logprob"])
        logprobs["top_logprobs"].append(tops)
        logprobs["text_offset"].append(offset)
        offset += len(token["token"])
    return logprobs


def write_reply(fields: Fields) -> bytes:
    """Write a response as JSON, choice by choice: one call would hold the interpreter, and everybody, for seconds."""
    parts = []
    for name, value in fields.items():
        if name == "choices":
            text = "[" + ",".join(map(encode_json, value)) + "]"
        else:
            text = encode_json(value)
        parts.append(f"{encode_json(name)}:{text}")
    return ("{" + ",".join(parts) + "}").encode()


def encode_json(value: object) -> str:
    """Write a value as JSON, between two pauses."""
    take_pause()
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def merge_deltas(deltas: Sequence[AnswerDelta]) -> AnswerDelta:
    """Merge the deltas of one choice into the whole choice."""
    return AnswerDelta(
        index=deltas[-1].index,
        text="".join(delta.text for delta in deltas if delta.text),
        thought="".join(delta.thought for delta in deltas if delta.thought),
        tokens=concat_lists(delta.tokens for delta in deltas),
        calls=[call for delta in deltas for call in delta.calls],
        end=deltas[-1].end,
        ids=concat_lists(delta.ids for delta in deltas),
    )


def concat_lists(lists: Iterable[list[Any] | None]) -> list[Any] | None:
    """Concatenate the lists that are not None; None if all are None."""
    present_lists = [items for items in lists if items is not None]
    if not present_lists:
        return None
    return list(chain.from_iterable(present_lists))


def format_logprobs(
    tokenizer: Any, piece: Piece, before: int, hidden: frozenset[int]
) -> list[Fields] | None:
    """Format the tokens of a piece with their log-probabilities, in OpenAI's chat format.

    Args:
        tokenizer: decodes the tokens; None shows ids instead.
        piece: the piece.
        before: id of the token before the piece; the text of the first token depends on it.
        hidden: ids of tokens to leave out, such as the end-of-sequence token.

    Returns: None if the request asked for no log-probabilities.
    """
    if piece.logprobs is None:
        return None
    return format_tokens(tokenizer, piece.logprobs, before, hidden)


def format_tokens(
    tokenizer: Any, logprobs: Sequence[TokenLogprob], before: int, hidden: frozenset[int]
) -> list[Fields]:
    """Format tokens with their log-probabilities. tokenizer, before, hidden: as for `format_logprobs`."""
    tokens: list[Fields] = []
    for entry in logprobs:
        if entry.token in hidden:
            continue
        fields = describe_token(tokenizer, before, entry.token, entry.logprob)
        tops = [describe_token(tokenizer, before, token, logprob) for token, logprob in entry.top]
        tokens.append(fields | {"top_logprobs": tops})
        before = entry.token
    return tokens


def describe_token(tokenizer: Any, before: int | None, token: int, logprob: float) -> Fields:
    """Describe a token by its text after the token `before`, its log-probability, and its bytes.

    `bytes` is None for a token that holds only a part of a character.
    """
    text = f"token_id:{token}"
    if tokenizer:
        text = decode_after(tokenizer, before, token)
    content = None
    if INCOMPLETE_CHARACTER not in text:
        content = list(text.encode())
    return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": content}
