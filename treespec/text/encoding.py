"""Tokenise conversations with a loss mask, and split off the held-out ones."""

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
from treespec.text.entries import Conversation, get_reasoning
from treespec.text.marks import find_marks, find_spans
from treespec.text.templates import Template, check_template, list_special_tokens, list_start_tokens
from treespec.text.token_rows import TokenRow, UnusableConversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Example:
    """A row of tokens to train on: a conversation, or the part of it up to one answer.

    Attributes:
        input_ids: [T] int64 token ids.
        loss_mask: [T] bool, True at the assistant's answers and their end tokens.
        key: digest of the conversation, the same in every run.
        part: index of this row among the rows of its conversation.

    A question H and its answer Y are five tokens in a template whose turns begin with <s> and <|head|>:

        input_ids  <s>  H  <|head|>  Y  </s>
        loss_mask  .    .  .         x  x
    """

    input_ids: Tensor
    loss_mask: Tensor
    key: str = ""
    part: int = 0

    def cut(self, max_length: int) -> "Example":
        """Truncate the row to its first `max_length` tokens."""
        input_ids = self.input_ids[:max_length]
        return replace(self, input_ids=input_ids, loss_mask=self.loss_mask[:max_length])


def split_held_out(
    examples: Sequence[Example], fraction: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """Split examples into (train, held out) by a hash of their conversations.

    The order of the examples does not matter, and equal conversations stay on one side. At least one conversation
    is held out, unless `fraction` is 0 or all conversations are equal.

    Args:
        examples: rows with their `key`.
        fraction: share of the distinct conversations to hold out, in [0, 1).
        seed: chooses which conversations are held out.

    Raises: InputError for a fraction outside [0, 1).
    """
    if not 0 <= fraction < 1:
        raise InputError(f"the held-out fraction is {fraction}, must lie in [0, 1)")
    keys = {example.key for example in examples}
    shuffled_keys = sorted(keys, key=lambda key: hash_text(f"{seed} {key}"))
    held_out_count = 0
    if fraction and shuffled_keys:
        held_out_count = min(max(1, round(fraction * len(shuffled_keys))), len(shuffled_keys) - 1)
    held_out_keys = set(shuffled_keys[:held_out_count])
    train: list[Example] = []
    held_out: list[Example] = []
    for example in examples:
        if example.key in held_out_keys:
            held_out.append(example)
        else:
            train.append(example)
    return train, held_out


def hash_text(text: str) -> str:
    """Digest of a text: 16 hexadecimal digits of BLAKE2b."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def encode_conversations(
    tokenizer: "PreTrainedTokenizerBase",
    conversations: Iterable[Conversation],
    template: Template,
    max_length: int,
) -> tuple[list[Example], ReadingReport]:
    """Tokenise conversations for training, truncated to `max_length` tokens.

    A conversation becomes one example, or several if its template renders earlier answers differently from how they
    were generated. A conversation is left out, and counted in the report, if an answer cannot be located, or if all
    its answers lie beyond `max_length`.

    Args:
        tokenizer: a fast tokenizer, which knows the characters of each token.
        conversations: messages, formatted texts or token rows.
        template: name of an fschat template; None uses the tokenizer's chat template.
        max_length: maximum number of tokens of an example.

    Returns: (examples, report).

    Raises: InputError if no example is left, if there is no template, or for a tokenizer without offsets.
    """
    if not tokenizer.is_fast:
        raise InputError(
            f"{type(tokenizer).__name__} does not say which characters its tokens come from; "
            "train with the model's fast tokenizer (tokenizer.json)"
        )
    examples = list[Example]()
    report = ReadingReport()
    encoder = Encoder(tokenizer, template)
    for conversation in conversations:
        try:
            rows, thoughtless = encoder.encode(conversation)
            cut_rows = [row.cut(max_length) for row in rows]
            cut_rows = [row for row in cut_rows if row.loss_mask.any()]
            if not cut_rows:
                raise UnusableConversation(f"no answer within {max_length} tokens")
        except UnusableConversation as error:
            report.leave_out(conversation.where, error)
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
    """Encodes conversations as training examples, with one tokenizer and template."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template: Template) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.special = list(list_special_tokens(tokenizer).values())

    @cached_property
    def opening(self) -> list[int]:
        """Token ids that every text begins with, such as the start token."""
        return list_start_tokens(self.tokenizer, self.template)

    def encode(self, conversation: Conversation) -> tuple[list[Example], int]:
        """Encode a conversation.

        Returns: (examples, number of answers left out because the template drops their thoughts).

        Raises:
            UnusableConversation: if the conversation cannot be trained on.
            InputError: if there is no template.
        """
        if conversation.tokens and (
            not conversation.messages or self._has_own_tokens(conversation)
        ):
            return self._encode_tokens(conversation), 0
        check_template(self.tokenizer, self.template)
        key = hash_conversation(conversation)
        thoughtless = 0
        try:
            if conversation.text is not None:
                marks = find_marks(self.tokenizer, self.template)
                rows = [TextRow(conversation.text, find_spans(conversation.text, marks))]
            else:
                placed = place_answers(
                    self.tokenizer,
                    conversation.messages,
                    self.template,
                    conversation.tools,
                    conversation.cut,
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
        """Tokenise a text; the loss mask covers its answers."""
        encoded = self.tokenizer(
            row.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids = encoded["input_ids"]
        offsets = np.array(encoded["offset_mapping"])
        mask = _mark_inside(offsets, row.spans, np.isin(ids, self.special))
        if ids[: len(self.opening)] != self.opening:
            ids = self.opening + ids
            mask = np.pad(mask, (len(self.opening), 0))
        return Example(
            torch.tensor(ids, dtype=torch.int64, device="cpu"), torch.from_numpy(mask), key, part
        )

    def _encode_tokens(self, conversation: Conversation) -> list[Example]:
        """Convert token rows into examples without tokenising; a row that is a prefix of another one joins it.

        Raises: UnusableConversation for ids beyond the vocabulary.
        """
        largest_id = max((max(row.ids, default=0) for row in conversation.tokens), default=0)
        if largest_id >= len(self.tokenizer):
            raise UnusableConversation("a token id is beyond the vocabulary", f"{largest_id}")
        key = hash_conversation(conversation)
        examples = []
        for part, row in enumerate(_share_token_rows(conversation.tokens)):
            input_ids = torch.tensor(row.ids, dtype=torch.int64, device="cpu")
            examples.append(
                Example(
                    input_ids, torch.tensor(row.counts, dtype=torch.bool, device="cpu"), key, part
                )
            )
        return examples

    def _has_own_tokens(self, conversation: Conversation) -> bool:
        """Whether the token rows of a conversation decode, with this tokenizer, to the words of its answers.

        If not, another target generated them, and the messages are tokenised instead.
        """
        answers = [message for message in conversation.messages if message["role"] == "assistant"]
        if len(answers) != len(conversation.tokens):
            return False
        for message, row in zip(answers, conversation.tokens, strict=True):
            answer_ids = list(compress(row.ids, row.counts))
            if max(row.ids, default=0) >= len(self.tokenizer):
                return False
            options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
            text = str(self.tokenizer.decode(answer_ids, **options))
            if not (
                has_all_words(text, get_words(message))
                and has_all_words(text, get_reasoning(message))
            ):
                return False
        return True


def _share_token_rows(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """Merge each row that is a prefix of a later row into that row, loss mask included."""
    merged_rows = list[TokenRow]()
    for row in reversed(rows):
        longer = _find_longer_row(merged_rows, row)
        if longer is None:
            merged_rows.insert(0, TokenRow(row.ids, list(row.counts)))
        else:
            for index, counts in enumerate(row.counts):
                if counts:
                    longer.counts[index] = True
    return merged_rows


def _find_longer_row(rows: Sequence[TokenRow], row: TokenRow) -> TokenRow | None:
    """The first of `rows` that begins with the tokens of `row`; None if there is none."""
    for candidate in rows:
        if candidate.ids[: len(row.ids)] == row.ids:
            return candidate
    return None


def hash_conversation(conversation: Conversation) -> str:
    """Digest of a conversation's content, whatever file and line it comes from."""
    content: object = [dict(message) for message in conversation.messages]
    if conversation.tokens and not conversation.messages:
        first_row = conversation.tokens[0]
        content = [first_row.ids, first_row.counts] + list(conversation.tokens[1:])
    elif conversation.tools or conversation.text is not None:
        content = [content, conversation.tools, conversation.text]
    return hash_text(json.dumps(content, sort_keys=True, default=str))


def _mark_inside(offsets: np.ndarray, spans: Iterable[Span], special: np.ndarray) -> np.ndarray:
    """Mark the tokens that spans of characters cover.

    A token that begins before a span counts if it ends inside, unless it is special: a special token of the header
    may include the spaces after it. Offsets may omit spaces; a token of only spaces begins where the previous token
    ended.

    Args:
        offsets: [T, 2] start and end (exclusive) of each token, in characters.
        spans: [start, end) in characters of each answer.
        special: [T] bool, True for special tokens.

    Returns: [T] bool.
    """
    starts, ends = offsets.reshape(-1, 2).T
    previous_ends = np.concatenate([[0], ends[:-1]])
    starts = np.where(starts < ends, starts, np.minimum(starts, previous_ends))
    mask = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        mask |= (starts < end) & ((starts >= start) | ((ends > start) & ~special))
    return mask
