"""Conversations as tokens, with a mask of those that a head learns from, and which are held out."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.text.answers import Span, answers, holds, marks_of, spans_in
from treespec.text.conversations import Report
from treespec.text.entries import Conversation, UnusableConversation, thought_of
from treespec.text.templates import Messages, Template, check, opening, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Example:
    """A conversation as tokens, for training.

    input_ids: [T] int64. loss_mask: [T] bool, true at the assistant's answers and their end tokens.
    key: a digest of the messages, the same in every run.
    thoughtless: answers that do not count, as the template drops their thoughts.
    """

    input_ids: Tensor
    loss_mask: Tensor
    key: str = ""
    thoughtless: int = 0


def split(
    examples: Sequence[Example], fraction: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """(train, held out). A hash draws the share `fraction` of distinct conversations to hold out.

    The order of the file does not matter, and equal conversations stay together. At least one is
    held out, unless fraction is 0 or all are the same. Raises InputError outside [0, 1).
    """
    if not 0 <= fraction < 1:
        raise InputError(f"the held-out fraction is {fraction}, must lie in [0, 1)")
    drawn = sorted({example.key for example in examples}, key=lambda key: digest(f"{seed} {key}"))
    count = min(max(1, round(fraction * len(drawn))), len(drawn) - 1) if fraction and drawn else 0
    held_out = set(drawn[:count])
    return (
        [example for example in examples if example.key not in held_out],
        [example for example in examples if example.key in held_out],
    )


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def encode_conversations(
    tokenizer: "PreTrainedTokenizerBase",
    conversations: Iterable[Conversation],
    template: Template,
    max_length: int,
) -> tuple[list[Example], Report]:
    """Conversations as `templates.encode` tokenises them, cut at `max_length` tokens.

    Those where the place of an answer is unknown, or whose answers lie beyond the cut, are left out
    and counted. Raises InputError where nothing is left, for a missing template, and for a tokenizer
    without offsets.
    """
    if not tokenizer.is_fast:
        raise InputError(
            f"{type(tokenizer).__name__} does not say which characters its tokens come from; "
            "train with the model's fast tokenizer (tokenizer.json)"
        )
    examples, report = [], Report()
    special, before = list(special_tokens(tokenizer).values()), opening(tokenizer, template)
    for talk in conversations:
        try:
            if talk.tokens is None:
                check(tokenizer, template)
                whole = _rendered(tokenizer, talk, template, special, before)
            else:
                whole = _tokens(talk.tokens, len(tokenizer))
            ids, mask = whole.input_ids[:max_length], whole.loss_mask[:max_length]
            if not mask.any():
                raise UnusableConversation(f"no answer within {max_length} tokens")
        except UnusableConversation as error:
            report.leave_out(talk.where, error)
            continue
        examples.append(replace(whole, input_ids=ids, loss_mask=mask))
        report.cut += len(whole.input_ids) > max_length
        report.thoughtless += whole.thoughtless
    report.used = len(examples)
    if not examples:
        raise InputError(
            f"no conversation can be trained on: {'; '.join(report.problems) or 'there are none'}"
        )
    return examples, report


def _rendered(
    tokenizer: "PreTrainedTokenizerBase",
    talk: Conversation,
    template: Template,
    special: list[int],
    before: list[int],
) -> Example:
    """A conversation through its template. Raises UnusableConversation.

    special: ids of special tokens. before: those that a text begins with.
    """
    # 1. Its text, the span of each answer, and of those that count.
    try:
        if talk.text is not None:
            text, spans = talk.text, spans_in(talk.text, marks_of(tokenizer, template))
        else:
            text, spans = answers(tokenizer, talk.messages, template, talk.tools)
    except UnusableConversation:
        raise
    except InputError as error:
        raise UnusableConversation("refused by the chat template", error) from error
    if not spans:
        raise UnusableConversation("an answer is lost in the chat template")
    learnt = _with_thoughts(text, spans, talk.messages)
    if not learnt:
        raise UnusableConversation("the chat template drops the thoughts of its answers")

    # 2. Its tokens, and those of the answers, but for the ends of those that a limit cut.
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, places = encoded["input_ids"], np.array(encoded["offset_mapping"])
    is_special = np.isin(ids, special)
    mask = _inside(places, learnt, is_special)
    if any(talk.cut):
        clear = len(spans) == len(talk.cut)  # which answer each flag is for
        cut = compress(spans, talk.cut) if clear else spans
        mask &= ~(_inside(places, cut, is_special) & is_special)
    if ids[: len(before)] != before:
        ids, mask = before + ids, np.pad(mask, (len(before), 0))
    dropped = len(spans) - len(learnt)
    return Example(torch.tensor(ids), torch.from_numpy(mask), key_of(talk), dropped)


def key_of(talk: Conversation) -> str:
    """The digest by which equal conversations are known, wherever they stand."""
    content: object = [dict(message) for message in talk.messages]
    if talk.tools or talk.text is not None:
        content = [content, talk.tools, talk.text]
    return digest(json.dumps(content, sort_keys=True, default=str))


def _with_thoughts(text: str, spans: list[Span], messages: Messages) -> list[Span]:
    """The answers without those whose thoughts the template dropped: no target answers like that.

    A template's own marks may be of another number than the answers; then one missing thought
    leaves none.
    """
    thoughts = [thought_of(message) for message in messages if message["role"] == "assistant"]
    if len(spans) != len(thoughts):
        return spans if all(holds(text, (0, len(text)), thought) for thought in thoughts) else []
    pairs = zip(spans, thoughts, strict=True)
    return [span for span, thought in pairs if holds(text, span, thought)]


def _tokens(tokens: tuple[list[int], list[bool]], vocabulary: int) -> Example:
    """A row of tokens as it stands. Raises UnusableConversation for ids beyond the vocabulary."""
    ids, counts = tokens
    if max(ids, default=0) >= vocabulary:
        raise UnusableConversation("a token id is beyond the vocabulary", f"{max(ids)}")
    content = digest(json.dumps([ids, counts]))
    return Example(torch.tensor(ids, dtype=torch.int64), torch.tensor(counts), content)


def _inside(offsets: np.ndarray, spans: Iterable[Span], special: np.ndarray) -> np.ndarray:
    """[T] bool: the tokens that spans of characters cover.

    offsets: [T, 2] characters. special: [T] bool. A token that begins before a span counts if it
    ends inside, unless it is special: a header that swallows the spaces after it. Offsets may omit
    spaces; a token of spaces alone begins where the previous one ended.
    """
    starts, ends = offsets.reshape(-1, 2).T
    starts = np.where(starts < ends, starts, np.minimum(starts, np.concatenate([[0], ends[:-1]])))
    mask = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        mask |= (starts < end) & ((starts >= start) | ((ends > start) & ~special))
    return mask
