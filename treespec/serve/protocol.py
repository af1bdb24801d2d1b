"""A response in the fields of OpenAI's API: its choices, whole or as deltas, and their log-probabilities.

Both endpoints, whole or streamed, make the same `AnswerDelta`s of choices; a whole response joins them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

from treespec.engine.request import Piece
from treespec.text.strings import INCOMPLETE_CHARACTER, decode_after

Fields = dict[str, Any]
MIN_LOGPROB = -9999.0  # OpenAI's logarithm of 0, which JSON has no number for


@final
@dataclass(frozen=True)
class AnswerDelta:
    """What an event adds to a choice.

    tokens: with their log-probabilities, None unless the request asks for them.
    calls: calls of tools. end: the finish reason. begins: whether it is the first delta of the choice.
    offset: characters of the choice's earlier tokens. ids: token ids, None unless the request asks for them.
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
        """The token ids under vLLM's name for them."""
        if self.ids is None:
            return {}
        return {"token_ids": self.ids}


def build_chat_choice(delta: AnswerDelta, whole: bool) -> Fields:
    """A delta as /v1/chat/completions streams it, or the whole choice."""
    message: Fields = {}
    if whole or delta.begins:
        message = {"role": "assistant", "refusal": None}
    if delta.text is not None:
        message["content"] = delta.text
    if delta.calls and whole:
        text = delta.text or ""
        message["content"] = text.strip() or None
        message["tool_calls"] = list(delta.calls)
    elif delta.calls:
        message["tool_calls"] = [{"index": i} | call for i, call in enumerate(delta.calls)]
    logprobs: Fields | None = None
    if delta.tokens is not None:
        logprobs = {"content": delta.tokens, "refusal": None}
    return {
        "index": delta.index,
        "message" if whole else "delta": message,
        "logprobs": logprobs,
        "finish_reason": delta.end,
        **delta.told_ids,
    }


def build_text_choice(delta: AnswerDelta, whole: bool) -> Fields:
    """A delta as /v1/completions streams it; a whole choice has the same fields."""
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
    """The `logprobs` of /v1/completions: parallel lists, from the tokens as chats write them.

    offset: characters of the choice before these tokens.
    """
    logprobs: Fields = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        logprobs["tokens"].append(token["token"])
        logprobs["token_logprobs"].append(token["logprob"])
        tops = {top["token"]: top["logprob"] for top in token["top_logprobs"]}
        logprobs["top_logprobs"].append(tops)
        logprobs["text_offset"].append(offset)
        offset += len(token["token"])
    return logprobs


def merge_deltas(deltas: Sequence[AnswerDelta]) -> AnswerDelta:
    """Merge the deltas of one choice into the whole choice."""
    return AnswerDelta(
        index=deltas[-1].index,
        text="".join(delta.text for delta in deltas if delta.text),
        tokens=concat_lists(delta.tokens for delta in deltas),
        calls=[call for delta in deltas for call in delta.calls],
        end=deltas[-1].end,
        ids=concat_lists(delta.ids for delta in deltas),
    )


def concat_lists(lists: Iterable[list[Any] | None]) -> list[Any] | None:
    """The items of all lists; None if every one of the lists is None."""
    known = [items for items in lists if items is not None]
    if not known:
        return None
    return list(chain.from_iterable(known))


def format_logprobs(
    tokenizer: Any, piece: Piece, before: int, hidden: frozenset[int]
) -> list[Fields] | None:
    """The tokens of a piece with their log-probabilities, as OpenAI's chats write them.

    Args:
        tokenizer: None if the target has none: the text of a token is then its id.
        before: the token before the piece, on which the text of its first token depends.
        hidden: tokens to leave out, such as the end-of-sequence token.

    Returns: None if the request asked for no log-probabilities.
    """
    if piece.logprobs is None:
        return None
    tokens: list[Fields] = []
    for told in piece.logprobs:
        if told.token in hidden:
            continue
        fields = describe_token(tokenizer, before, told.token, told.logprob)
        tops = [describe_token(tokenizer, before, token, logprob) for token, logprob in told.top]
        tokens.append(fields | {"top_logprobs": tops})
        before = told.token
    return tokens


def describe_token(tokenizer: Any, before: int, token: int, logprob: float) -> Fields:
    """One token: its text after the token `before`, its log-probability, its bytes.

    A token that holds a part of a character has no bytes.
    """
    text = f"token_id:{token}"
    if tokenizer:
        text = decode_after(tokenizer, before, token)
    content = None
    if INCOMPLETE_CHARACTER not in text:
        content = list(text.encode())
    return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": content}
