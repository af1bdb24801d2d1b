"""Conversations as tokens, with a mask of those that a head learns from, and which are held out."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.text.answers import Span, TextRow, get_words, has_all_words, place_answers
from treespec.text.conversations import ReadingReport
from treespec.text.entries import Conversation, TokenRow, UnusableConversation, get_reasoning
from treespec.text.marks import find_marks, find_spans
from treespec.text.templates import Template, check_template, list_special_tokens, list_start_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Example:
    """A row of tokens to train on: a conversation, or what one of its answers was generated from.

    input_ids: [T] int64. loss_mask: [T] bool, true at the assistant's answers and their end tokens.
    key: a digest of the messages, the same in every run. part: which of the rows of that conversation it is.

    A question H and its answer Y, whose template begins turns with <s> and <|head|>, five tokens:

        input_ids  <s>  H  <|head|>  Y  </s>
        loss_mask  .    .  .         x  x
    """

    input_ids: Tensor
    loss_mask: Tensor
    key: str = ""
    part: int = 0

    def cut(self, max_length: int) -> "Example":
        """Its first `max_length` tokens."""
        input_ids = self.input_ids[:max_length]
        return replace(self, input_ids=input_ids, loss_mask=self.loss_mask[:max_length])


def split_held_out(
    examples: Sequence[Example], fraction: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """(train, held out). A hash draws the share `fraction` of distinct conversations to hold out.

    The order of the file does not matter, and equal conversations stay together. At least one is
    held out, unless fraction is 0 or all are the same. Raises InputError outside [0, 1).
    """
    if not 0 <= fraction < 1:
        raise InputError(f"the held-out fraction is {fraction}, must lie in [0, 1)")
    keys = {example.key for example in examples}
    drawn = sorted(keys, key=lambda key: hash_text(f"{seed} {key}"))
    count = 0
    if fraction and drawn:
        count = min(max(1, round(fraction * len(drawn))), len(drawn) - 1)
    held_out_keys = set(drawn[:count])
    train: list[Example] = []
    held_out: list[Example] = []
    for example in examples:
        if example.key in held_out_keys:
            held_out.append(example)
        else:
            train.append(example)
    return train, held_out


def hash_text(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def encode_conversations(
    tokenizer: "PreTrainedTokenizerBase",
    conversations: Iterable[Conversation],
    template: Template,
    max_length: int,
) -> tuple[list[Example], ReadingReport]:
    """Conversations as `templates.encode` tokenises them, cut at `max_length` tokens.

    A conversation is one example, or several if its template shows earlier answers otherwise than they were
    generated. One is left out and counted if the place of an answer is unknown, or if its answers lie beyond the
    cut. Raises InputError if nothing is left, for a missing template, and for a tokenizer without offsets.
    """
    if not tokenizer.is_fast:
        raise InputError(
            f"{type(tokenizer).__name__} does not say which characters its tokens come from; "
            "train with the model's fast tokenizer (tokenizer.json)"
        )
    examples = list[Example]()
    report = ReadingReport()
    encoder = Encoder(tokenizer, template)
    for talk in conversations:
        try:
            rows, thoughtless = encoder.encode(talk)
            cut_rows = [row.cut(max_length) for row in rows]
            cut_rows = [row for row in cut_rows if row.loss_mask.any()]
            if not cut_rows:
                raise UnusableConversation(f"no answer within {max_length} tokens")
        except UnusableConversation as error:
            report.leave_out(talk.where, error)
            continue
        examples += cut_rows
        report.used += 1
        if any(len(row.input_ids) > max_length for row in rows):
            report.cut += 1
        report.thoughtless += thoughtless
    if not examples:
        problems = "; ".join(report.problems) or "there are none"
        raise InputError(f"no conversation can be trained on: {problems}")
    return examples, report


class Encoder:
    """Makes examples of conversations, with one tokenizer and template."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template: Template) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.special = list(list_special_tokens(tokenizer).values())

    @cached_property
    def opening(self) -> list[int]:
        """The tokens that a text begins with."""
        return list_start_tokens(self.tokenizer, self.template)

    def encode(self, talk: Conversation) -> tuple[list[Example], int]:
        """The examples of a conversation, and how many of its answers lost their thoughts.

        Raises UnusableConversation, and InputError for a missing template.
        """
        if talk.tokens and (not talk.messages or self._has_own_tokens(talk)):
            return self._encode_tokens(talk), 0
        check_template(self.tokenizer, self.template)
        key = hash_conversation(talk)
        thoughtless = 0
        try:
            if talk.text is not None:
                marks = find_marks(self.tokenizer, self.template)
                rows = [TextRow(talk.text, find_spans(talk.text, marks))]
            else:
                placed = place_answers(
                    self.tokenizer, talk.messages, self.template, talk.tools, talk.cut
                )
                rows = placed.rows
                thoughtless = placed.thoughtless
        except UnusableConversation:
            raise
        except InputError as error:
            raise UnusableConversation("refused by the chat template", error) from error
        if thoughtless and not rows:
            raise UnusableConversation("the chat template drops the thoughts of its answers")
        if not rows:
            raise UnusableConversation("no answer counts: each has the weight 0")
        return [self._encode_row(row, key, part) for part, row in enumerate(rows)], thoughtless

    def _encode_row(self, row: TextRow, key: str, part: int) -> Example:
        """A text and the answers in it as tokens."""
        encoded = self.tokenizer(
            row.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids = encoded["input_ids"]
        places = np.array(encoded["offset_mapping"])
        mask = _mark_inside(places, row.spans, np.isin(ids, self.special))
        if ids[: len(self.opening)] != self.opening:
            ids = self.opening + ids
            mask = np.pad(mask, (len(self.opening), 0))
        return Example(torch.tensor(ids), torch.from_numpy(mask), key, part)

    def _encode_tokens(self, talk: Conversation) -> list[Example]:
        """Rows of tokens as they stand; one that begins another one shares it.

        Raises UnusableConversation for ids beyond the vocabulary.
        """
        largest = max((max(row.ids, default=0) for row in talk.tokens), default=0)
        if largest >= len(self.tokenizer):
            raise UnusableConversation("a token id is beyond the vocabulary", f"{largest}")
        key = hash_conversation(talk)
        examples = []
        for part, row in enumerate(_share_token_rows(talk.tokens)):
            input_ids = torch.tensor(row.ids, dtype=torch.int64)
            examples.append(Example(input_ids, torch.tensor(row.counts), key, part))
        return examples

    def _has_own_tokens(self, talk: Conversation) -> bool:
        """Whether the tokens of a conversation are this tokenizer's: they hold the words of its answers.

        Answers of another target are read from their messages.
        """
        answers = [message for message in talk.messages if message["role"] == "assistant"]
        if len(answers) != len(talk.tokens):
            return False
        for message, row in zip(answers, talk.tokens, strict=True):
            counted = list(compress(row.ids, row.counts))
            if max(row.ids, default=0) >= len(self.tokenizer):
                return False
            options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
            text = str(self.tokenizer.decode(counted, **options))
            if not (
                has_all_words(text, get_words(message))
                and has_all_words(text, get_reasoning(message))
            ):
                return False
        return True


def _share_token_rows(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """The rows without those that a later one begins with, whose tokens count there."""
    shared = list[TokenRow]()
    for row in reversed(rows):
        longer = _find_longer_row(shared, row)
        if longer is None:
            shared.insert(0, TokenRow(row.ids, list(row.counts)))
        else:
            for index, counts in enumerate(row.counts):
                if counts:
                    longer.counts[index] = True
    return shared


def _find_longer_row(rows: Sequence[TokenRow], row: TokenRow) -> TokenRow | None:
    """The first of the rows that begins with the tokens of `row`."""
    for other in rows:
        if other.ids[: len(row.ids)] == row.ids:
            return other
    return None


def hash_conversation(talk: Conversation) -> str:
    """The digest by which equal conversations are known, wherever they stand."""
    content: object = [dict(message) for message in talk.messages]
    if talk.tokens and not talk.messages:
        first = talk.tokens[0]
        content = [first.ids, first.counts] + list(talk.tokens[1:])
    elif talk.tools or talk.text is not None:
        content = [content, talk.tools, talk.text]
    return hash_text(json.dumps(content, sort_keys=True, default=str))


def _mark_inside(offsets: np.ndarray, spans: Iterable[Span], special: np.ndarray) -> np.ndarray:
    """[T] bool: the tokens that spans of characters cover.

    Args:
        offsets: [T, 2] first character of each token, and the one after its last.
        spans: [start, end) in characters of each answer.
        special: [T] bool, which tokens are special.

    A token that begins before a span counts if it ends inside, unless it is special: a header that
    swallows the spaces after it. Offsets may omit spaces; a token of only spaces begins where the
    previous one ended.
    """
    starts, ends = offsets.reshape(-1, 2).T
    previous_ends = np.concatenate([[0], ends[:-1]])
    starts = np.where(starts < ends, starts, np.minimum(starts, previous_ends))
    mask = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        mask |= (starts < end) & ((starts >= start) | ((ends > start) & ~special))
    return mask
