"""Conversations from files, as tokens with a mask of those that a head learns from."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.text.entries import (
    UnusableConversation,
    cuts_of,
    entries,
    messages_of,
    parsed,
    source_of,
)
from treespec.text.templates import Messages, Template, answers, check, opening, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN = 5  # problems kept in a report
BATCH = 64  # conversations given to the tokenizer at once
FORM = '{"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}]}'


@dataclass
class Report:
    """Counts: conversations used, those of them that were cut, and those left out by reason."""

    used: int = 0
    cut: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)  # the first few, with file and line

    def leave_out(self, where: str, error: UnusableConversation) -> None:
        self.left_out[error.reason] += 1
        if len(self.problems) < SHOWN:
            self.problems.append(f"{where}: {error}")

    def __str__(self) -> str:
        cut = f", {self.cut} of them cut at the maximal length" if self.cut else ""
        counts = [f"{reason}: {count}" for reason, count in self.left_out.most_common()]
        reasons = f" ({'; '.join(counts)})" if counts else ""
        return f"{self.used} conversations used{cut}, {self.left_out.total()} left out{reasons}"


@dataclass(frozen=True)
class Conversation:
    """User and assistant alternate; the last turn is an assistant's. A system turn may come first.

    where: file and line. source: its id in the file, else its number there.
    cut: for each answer whether a limit ended it, so that its end token is not the target's.
    """

    messages: list[dict[str, str]]
    where: str = ""
    source: str = ""
    cut: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Example:
    """A conversation as tokens, for training.

    input_ids: [T] int64. loss_mask: [T] bool, true at the assistant's answers and their end tokens.
    key: a digest of the messages, the same in every run.
    """

    input_ids: Tensor
    loss_mask: Tensor
    key: str = ""


def read_conversations(
    path: str | Path, answered: bool = True
) -> tuple[list[Conversation], Report]:
    """Conversations of a JSONL file (or a JSON list), in ShareGPT's form or as messages.

    answered: drop a last question without an answer; False keeps it, for the target to answer.
    Unusable ones are left out and counted. Raises InputError for a file that cannot be read or has
    no usable conversation.
    """
    found, report = [], Report()
    for where, raw in entries(Path(path)):
        try:
            entry = parsed(raw)
            messages = messages_of(entry, answered)
            found.append(Conversation(messages, where, source_of(entry, where), cuts_of(entry)))
        except UnusableConversation as error:
            report.leave_out(where, error)
    report.used = len(found)
    if not found:
        shown = "; ".join(report.problems[: len(report.left_out)]) or "the file is empty"
        no_json = "not valid JSON" in report.left_out
        form = f"; give one conversation a line, such as {FORM}" if no_json else ""
        raise InputError(f"no usable conversation in {path}: {shown}{form}")
    return found, report


def encode_conversation(
    tokenizer: "PreTrainedTokenizerBase", messages: Messages, template: Template, max_length: int
) -> Example:
    """One conversation as `templates.encode` tokenises it, cut at max_length tokens.

    Raises UnusableConversation where the place of an answer in the rendered text is unknown.
    """
    check(tokenizer, template)
    return _cut(
        _usable(_encode_batch(tokenizer, [Conversation(list(messages))], template)[0]), max_length
    )


def encode_conversations(
    tokenizer: "PreTrainedTokenizerBase",
    conversations: Iterable[Conversation],
    template: Template,
    max_length: int,
) -> tuple[list[Example], Report]:
    """All conversations by `encode_conversation`. Those that it refuses are left out and counted.

    Raises InputError where nothing is left, for a missing template, and for a tokenizer without
    offsets.
    """
    check(tokenizer, template)
    examples, report = [], Report()
    left = iter(conversations)
    while batch := list(islice(left, BATCH)):
        encoded = _encode_batch(tokenizer, batch, template)
        for one, example in zip(batch, encoded, strict=True):
            try:
                whole = _usable(example)
                examples.append(_cut(whole, max_length))
            except UnusableConversation as error:
                report.leave_out(one.where, error)
            else:
                report.cut += len(whole.input_ids) > max_length
    report.used = len(examples)
    if not examples:
        raise InputError(
            f"no conversation can be trained on: {'; '.join(report.problems) or 'there are none'}"
        )
    return examples, report


def split(
    examples: Sequence[Example], fraction: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """(train, held out). A hash draws the share `fraction` of distinct conversations to hold out.

    The order of the file does not matter, and equal conversations stay together. At least one is
    held out, unless fraction is 0 or all are the same. Raises InputError outside [0, 1).
    """
    if not 0 <= fraction < 1:
        raise InputError(f"the held-out fraction is {fraction}, must lie in [0, 1)")
    drawn = sorted({example.key for example in examples}, key=lambda key: _digest(f"{seed} {key}"))
    count = min(max(1, round(fraction * len(drawn))), len(drawn) - 1) if fraction and drawn else 0
    held_out = set(drawn[:count])
    return (
        [example for example in examples if example.key not in held_out],
        [example for example in examples if example.key in held_out],
    )


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def _encode_batch(
    tokenizer: "PreTrainedTokenizerBase", batch: Sequence[Conversation], template: Template
) -> list[Example | UnusableConversation]:
    """Each conversation at full length, or the reason that it is unusable."""
    if not tokenizer.is_fast:
        raise InputError(
            f"{type(tokenizer).__name__} does not say which characters its tokens come from; "
            "train with the model's fast tokenizer (tokenizer.json)"
        )
    # 1. Render, and tokenise the whole batch at once.
    special = special_tokens(tokenizer)
    before = opening(tokenizer, template)
    rendered = [_rendered(tokenizer, talk.messages, template, special) for talk in batch]
    texts = [one[0] for one in rendered if isinstance(one, tuple)]
    options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
    encoded = tokenizer(texts, **options) if texts else {}
    rows = zip(encoded.get("input_ids", ()), encoded.get("offset_mapping", ()), strict=True)

    # 2. Mask the tokens of the answers.
    examples: list[Example | UnusableConversation] = []
    for talk, one in zip(batch, rendered, strict=True):
        if isinstance(one, UnusableConversation):
            examples.append(one)
            continue
        ids, offsets = next(rows)
        places, marks = np.array(offsets), np.isin(ids, list(special.values()))
        mask = _inside(places, one[1], marks)
        if any(talk.cut):
            spans = one[1]
            clear = len(spans) == len(talk.cut)  # which answer each flag is for
            flags = talk.cut if clear else (True,) * len(spans)
            cut = [span for span, is_cut in zip(spans, flags, strict=True) if is_cut]
            mask &= ~(_inside(places, cut, marks) & marks)
        if ids[: len(before)] != before:
            ids = before + ids
            mask = np.concatenate([np.zeros(len(before), dtype=bool), mask])
        key = _digest(json.dumps([dict(message) for message in talk.messages], sort_keys=True))
        examples.append(Example(torch.tensor(ids), torch.from_numpy(mask), key))
    return examples


def _rendered(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Messages,
    template: Template,
    special: Iterable[str],
) -> tuple[str, list[tuple[int, int]]] | UnusableConversation:
    try:
        text, spans = answers(tokenizer, messages, template, special)
    except InputError as error:
        return UnusableConversation("refused by the chat template", error)
    if not spans:
        return UnusableConversation("an answer is lost in the chat template")
    return text, spans


def _usable(example: Example | UnusableConversation) -> Example:
    if isinstance(example, UnusableConversation):
        raise example
    return example


def _cut(example: Example, length: int) -> Example:
    mask = example.loss_mask[:length]
    if not mask.any():
        raise UnusableConversation(f"no answer within {length} tokens")
    return Example(example.input_ids[:length], mask, example.key)


def _inside(
    offsets: np.ndarray, spans: Sequence[tuple[int, int]], special: np.ndarray
) -> np.ndarray:
    """[T] bool: the tokens that spans of characters cover.

    offsets: [T, 2] characters. special: [T] bool. A token that begins before a span counts if it
    ends inside, unless it is special: a header that swallows the spaces after it. Offsets may omit
    spaces; a token of spaces alone begins where the previous one ended.
    """
    starts, ends = offsets.reshape(-1, 2).T
    starts = np.where(starts < ends, starts, np.minimum(starts, np.concatenate([[0], ends[:-1]])))
    mask = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        within = (starts >= start) & (starts < end)
        mask |= within | ((starts < start) & (ends > start) & ~special)
    return mask
