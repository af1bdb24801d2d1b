"""The questions of conversations: which are asked, in what order, and the seeds of their answers.

All of it follows from a row's content and the seed. So an answer depends neither on the place of its
row in the file, nor on the rows beside it, and a run of more rows contains a run of fewer.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, final

from treespec.text.entries import Conversation
from treespec.train.regenerate.config import part_of
from treespec.train.regenerate.english import passes


@dataclass(frozen=True)
class Row:
    """What is asked of the target, turn by turn.

    key: a digest of system message and questions. source: the id of its conversation in the data.
    """

    key: str
    source: str
    system: str | None
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """ended: by `model`, or by the limit `max_new_tokens`."""

    text: str
    tokens: int
    ended: str


@final
@dataclass(frozen=True)
class Answered:
    """A row with the answers that it has so far. problem: why there is none, or no further one."""

    row: Row
    greedy: bool
    answers: tuple[Answer, ...] = ()
    problem: str | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The questions that have answers, with them."""
        system = self.row.system
        messages = [] if system is None else [{"role": "system", "content": system}]
        for question, answer in zip(self.row.questions, self.answers, strict=False):
            messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer.text},
            ]
        return messages

    @property
    def left(self) -> int:
        """Questions without an answer."""
        return len(self.row.questions) - len(self.answers)

    @property
    def asks(self) -> bool:
        """Whether there is another question to ask."""
        return not self.problem and self.left > 0

    @property
    def next_question(self) -> list[dict[str, str]]:
        """The conversation up to the first question without an answer."""
        question = self.row.questions[len(self.answers)]
        return [*self.messages, {"role": "user", "content": question}]

    def line(self, temperature: float) -> dict[str, Any]:
        """Its line in conversations.jsonl, or in left-out.jsonl where no question could be answered.

        temperature: of answers that are not greedy.
        """
        line: dict[str, Any] = {"id": self.row.source, "row": self.row.key}
        if self.answers:
            line["messages"] = self.messages
            line["temperature"] = 0.0 if self.greedy else temperature
            line["tokens"] = [answer.tokens for answer in self.answers]
            line["ended"] = [answer.ended for answer in self.answers]
        return line | ({"problem": self.problem} if self.problem else {})

    def taking(self, answer: Answer) -> "Answered":
        """With one more answer. An empty one ends the conversation: no reader takes it."""
        if not answer.text.strip():
            return self.ending("an answer is empty")
        return replace(self, answers=(*self.answers, answer))

    def ending(self, problem: str) -> "Answered":
        """With nothing more to ask."""
        return replace(self, problem=problem)


def rows_of(conversations: Iterable[Conversation], turns: int) -> list[Row]:
    """The first questions of each conversation; of equal rows the first alone."""
    rows: dict[str, Row] = {}
    for conversation in conversations:
        messages = conversation.messages
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        asked = [message["content"] for message in messages if message["role"] == "user"]
        row = row_of(conversation.source, system, asked[:turns])
        rows.setdefault(row.key, row)
    return list(rows.values())


def row_of(source: str, system: str | None, questions: Iterable[str]) -> Row:
    asked = tuple(questions)
    key = hashlib.blake2b(json.dumps([system, asked]).encode(), digest_size=8).hexdigest()
    return Row(key, source, system, asked)


def passing(row: Row, filter: str) -> Row | None:
    """A row up to its first question that a `--filter` leaves out; None where that is the first of all.

    Leaving out later questions changes no answer.
    """
    kept = tuple(takewhile(lambda question: passes(question, filter), row.questions))
    return replace(row, questions=kept) if kept else None


def in_order(rows: Iterable[Row], seed: int, part: str) -> list[Row]:
    """The rows of a part, shuffled by the seed: the first of them are a sample of all."""
    number, parts = part_of(part)
    mine = [row for row in rows if drawn(seed, row.key, "part") % parts == number]
    return sorted(mine, key=lambda row: drawn(seed, row.key, "order"))


def is_greedy(row: Row, seed: int, share: float) -> bool:
    """Whether a row is among the share that is answered at temperature 0."""
    return drawn(seed, row.key, "greedy") < share * 2**63


def drawn(seed: int, key: str, what: str | int) -> int:
    """A number in [0, 2^63) that is the same on every machine. what: a turn's number gives its seed."""
    content = json.dumps([seed, key, what]).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1
