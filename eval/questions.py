"""Questions in FastChat's format: our own, those of a published suite, or a file's."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from treespec.errors import InputError
from treespec.eval.suites import SUITES, suite
from treespec.options import QUESTIONS, either, nearest

BUILTIN = Path(__file__).with_name("builtin.jsonl")
# 18, -3, 1,000, $2.50; the minus of 7-3 is no sign
NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def last_number(text: str) -> Decimal | None:
    """The last number in a text, without dollar signs and commas between thousands.

    As the `flexible-extract` filter of lm-evaluation-harness for GSM8K.
    """
    numbers = NUMBER.findall(text)
    return Decimal(re.sub(r"[$,]", "", numbers[-1])) if numbers else None


@dataclass(frozen=True)
class Question:
    """A conversation's user turns, asked one after the other.

    task: what results are grouped by, if not the category. number: with which a right completion
    of the last turn ends, if any.
    """

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    task: str = ""
    number: str | None = None

    @property
    def group(self) -> str:
        return self.task or self.category

    def right(self, text: str) -> bool | None:
        """Whether a completion is right: 18, 18.00 and $18 are the same. None: nobody knows."""
        return None if self.number is None else last_number(text) == last_number(self.number)


def load_questions(
    spec: str = "builtin", categories: Collection[str] = ()
) -> tuple[list[Question], list[str]]:
    """The questions of `builtin`, of a suite or of a JSONL file, which is read once: it may be a pipe.

    categories: keep the questions of these alone; default: all. Of Spec-Bench its tasks count too.
    Returns (questions, what is wrong with the lines left out). Raises InputError for a file that
    cannot be read or has no question, for a category that it lacks, and for a failed download.
    """
    # 1. The question of each line, or what is wrong with it.
    content = _content(spec).removeprefix(b"\xef\xbb\xbf")
    questions: dict[int | str, Question] = {}
    problems = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            question = _question(line)
            if question.question_id in questions:
                raise ValueError(f"question_id {question.question_id!r} appears a second time")
            questions[question.question_id] = question
        except (ValueError, RecursionError) as error:
            problems.append(f"{Path(spec).name}:{number}: {error}")
    if not questions:
        raise InputError(f"no question in {spec}: {'; '.join(problems[:3]) or 'the file is empty'}")

    # 2. Those of the categories.
    names = {*categories}
    every = questions.values()
    there = dict.fromkeys(question.group for question in every)
    for name in names - {*there} - {question.category for question in every}:
        raise InputError(
            f"{spec} has no category {name!r}{nearest(name, there)}: {', '.join(there)}"
        )
    return [q for q in every if not names or names & {q.category, q.group}], problems


def digest_of(questions: Sequence[Question]) -> str:
    """A SHA-256 of what is asked."""
    return hashlib.sha256(json.dumps([*map(astuple, questions)]).encode()).hexdigest()


def first_of_each(questions: Sequence[Question], count: int | None) -> list[Question]:
    """The first `count` questions of each category, of Spec-Bench each task; all for None."""
    seen: Counter[str] = Counter()
    chosen = []
    for question in questions:
        seen[question.group] += 1
        if count is None or seen[question.group] <= count:
            chosen.append(question)
    return chosen


def _content(spec: str) -> bytes:
    """JSONL of a name or a file. Raises InputError for anything else."""
    if spec in SUITES:
        return suite(spec)
    path = BUILTIN if spec == "builtin" else Path(spec)
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read questions from {spec}: {error.strerror}{nearest(spec, QUESTIONS)}; give "
            f"{either([*QUESTIONS, 'a JSONL file'])}"
        ) from error


def _question(line: bytes) -> Question:
    """Raises ValueError for a line that holds no question."""
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    question_id, turns, number = (fields.get(name) for name in ("question_id", "turns", "number"))
    if not isinstance(question_id, int | str):
        raise ValueError("no `question_id`, a number or a text")
    words: list[Any] = turns if isinstance(turns, list) and turns else [None]
    if not all(isinstance(turn, str) and turn.strip() for turn in words):
        raise ValueError("no `turns`, a list of texts that are not empty")
    "".join(words).encode()  # half of a surrogate pair is an error here, not later in the tokenizer
    if number is not None and last_number(number := str(number)) is None:
        raise ValueError(f"`number` holds no number: {number!r}")
    category, task = (str(fields.get(*field)) for field in (("category", "general"), ("task", "")))
    return Question(question_id, category, tuple(words), task, number)
