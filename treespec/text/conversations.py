"""Conversations from files, as tokens with a mask of those that a head learns from."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.text.archives import refuse_archive
from treespec.text.templates import Messages, Template, answers, check, opening, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = {"system": "system", "human": "user", "user": "user"}
ROLES |= dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bot"), "assistant")
SHOWN = 5  # problems kept in a report
BATCH = 64  # conversations given to the tokenizer at once
FORM = '{"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}]}'


class UnusableConversation(InputError):
    """A conversation that cannot be trained on. Reports count its reason and show its detail."""

    def __init__(self, reason: str, detail: object = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


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
    """Alternating turns of user and assistant, an assistant's last. A system turn may come first."""

    messages: list[dict[str, str]]
    where: str = ""  # file and line


@dataclass(frozen=True)
class Example:
    """A conversation as tokens, for training.

    input_ids: [T] int64. loss_mask: [T] bool, true at the assistant's answers and their end tokens.
    key: a digest of the messages, the same in every run.
    """

    input_ids: Tensor
    loss_mask: Tensor
    key: str = ""


def read_conversations(path: str | Path) -> tuple[list[Conversation], Report]:
    """Conversations of a JSONL file (or a JSON list), in ShareGPT's form or as messages.

    Unusable ones are left out and counted. Raises InputError for a file that cannot be read or has
    no usable conversation.
    """
    found, report = [], Report()
    for where, raw in _entries(Path(path)):
        try:
            found.append(Conversation(_messages(raw), where))
        except UnusableConversation as error:
            report.leave_out(where, error)
    report.used = len(found)
    if not found:
        shown = "; ".join(report.problems[: len(report.left_out)]) or "the file is empty"
        form = f"; give one conversation a line, such as {FORM}" if "not valid JSON" in report.left_out else ""
        raise InputError(f"no usable conversation in {path}: {shown}{form}")
    return found, report


def encode_conversation(
    tokenizer: "PreTrainedTokenizerBase", messages: Messages, template: Template, max_length: int
) -> Example:
    """One conversation as `templates.encode` tokenises it, cut at max_length tokens.

    Raises UnusableConversation where the place of an answer in the rendered text is unknown.
    """
    check(tokenizer, template)
    return _cut(_usable(_encode_batch(tokenizer, [messages], template)[0]), max_length)


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
        encoded = _encode_batch(tokenizer, [one.messages for one in batch], template)
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
        raise InputError(f"no conversation can be trained on: {'; '.join(report.problems) or 'there are none'}")
    return examples, report


def split(examples: Sequence[Example], fraction: float, seed: int) -> tuple[list[Example], list[Example]]:
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


def _entries(path: Path) -> Iterator[tuple[str, object]]:
    """(file and line, the entry of a JSON list or the bytes of the line)."""
    try:
        with path.open("rb") as file:
            head = file.read(4096)
            refuse_archive(path, head)
            head = head.removeprefix(b"\xef\xbb\xbf").lstrip()
            file.seek(0)
            if head.startswith(b"["):
                entries = json.loads(file.read())
                yield from ((f"{path.name} entry {i}", entry) for i, entry in enumerate(entries, 1))
            else:
                for i, line in enumerate(file, 1):
                    if line.strip():
                        yield f"{path.name}:{i}", line.removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; give a JSONL file") from error
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} begins as a JSON list but is not valid JSON: {error}") from error


def _messages(entry: object) -> list[dict[str, str]]:
    """The turns of one entry. Raises UnusableConversation.

    Answers before the first question are dropped, as in FastChat and EAGLE. So is a last question
    without an answer.
    """
    # 1. The list of turns.
    if isinstance(entry, bytes):
        try:
            entry = json.loads(entry)
        except (ValueError, RecursionError) as error:
            raise UnusableConversation("not valid JSON", error) from error
    turns = entry.get("conversations", entry.get("messages")) if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        raise UnusableConversation("no list under `conversations` or `messages`")

    # 2. Each turn: its role, its text, and whether it is that role's turn.
    system: list[dict[str, str]] = []
    messages: list[dict[str, str]] = []
    for i, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise UnusableConversation("a turn is not an object", f"turn {i}")
        name, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        role = ROLES.get(name.lower()) if isinstance(name, str) else None
        if role is None:
            raise UnusableConversation("a turn has an unknown role", f"turn {i}, {name!r}")
        if not isinstance(content, str) or re.search("[\ud800-\udfff]", content):
            raise UnusableConversation("the content of a turn is not text", f"turn {i}")
        if role == "system" and i == 1:
            system = [{"role": role, "content": content}] if content.strip() else []
        elif messages or role != "assistant":
            if role != ("user", "assistant")[len(messages) % 2]:
                raise UnusableConversation("user and assistant do not alternate", f"turn {i} is {name!r}")
            if not content.strip():
                raise UnusableConversation("a turn is empty", f"turn {i}")
            messages.append({"role": role, "content": content})

    # 3. Without a last question that has no answer.
    messages = messages[: len(messages) // 2 * 2]
    if not messages:
        raise UnusableConversation("no assistant turn that answers a user turn")
    return system + messages


def _encode_batch(
    tokenizer: "PreTrainedTokenizerBase", batch: Sequence[Messages], template: Template
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
    rendered = [_rendered(tokenizer, messages, template, special) for messages in batch]
    texts = [one[0] for one in rendered if isinstance(one, tuple)]
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False) if texts else {}
    rows = zip(encoded.get("input_ids", ()), encoded.get("offset_mapping", ()), strict=True)

    # 2. Mask the tokens of the answers.
    examples: list[Example | UnusableConversation] = []
    for messages, one in zip(batch, rendered, strict=True):
        if isinstance(one, UnusableConversation):
            examples.append(one)
            continue
        ids, offsets = next(rows)
        mask = _inside(np.array(offsets), one[1], np.isin(ids, list(special.values())))
        if ids[: len(before)] != before:
            ids = before + ids
            mask = np.concatenate([np.zeros(len(before), dtype=bool), mask])
        key = _digest(json.dumps([dict(message) for message in messages], sort_keys=True))
        examples.append(Example(torch.tensor(ids), torch.from_numpy(mask), key))
    return examples


def _rendered(
    tokenizer: "PreTrainedTokenizerBase", messages: Messages, template: Template, special: Iterable[str]
) -> tuple[str, list[tuple[int, int]]] | UnusableConversation:
    try:
        text, spans = answers(tokenizer, messages, template, special)
    except InputError as error:
        return UnusableConversation("refused by the chat template", error)
    return (text, spans) if spans else UnusableConversation("an answer is lost in the chat template")


def _usable(example: Example | UnusableConversation) -> Example:
    if isinstance(example, UnusableConversation):
        raise example
    return example


def _cut(example: Example, length: int) -> Example:
    mask = example.loss_mask[:length]
    if not mask.any():
        raise UnusableConversation(f"no answer within {length} tokens")
    return Example(example.input_ids[:length], mask, example.key)


def _inside(offsets: np.ndarray, spans: Sequence[tuple[int, int]], special: np.ndarray) -> np.ndarray:
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
