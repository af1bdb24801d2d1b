"""Questions in FastChat's format: our own, those of a published suite, or a file's."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from treespec.errors import InputError
from treespec.eval.suites.checks import Check, check_of
from treespec.eval.suites.known import SUITES, suite
from treespec.options import either, nearest
from treespec.text.sources import refuse_archive

BUILTIN = Path(__file__).with_name("builtin.jsonl")

SETS: dict[str, Callable[[], bytes]] = {
    "builtin": BUILTIN.read_bytes,
    **{name: partial(suite, name) for name in SUITES},
}


@dataclass(frozen=True)
class Question:
    """A conversation's user turns, asked one after the other.

    check: of the last completion, if any. task: what results are grouped by, if not the category.
    """

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    check: Check | None = None
    task: str = ""

    @property
    def group(self) -> str:
        return self.task or self.category


def load_questions(
    spec: str = "builtin", categories: Collection[str] = ()
) -> tuple[list[Question], list[str]]:
    """The questions of one of `SETS` or of a JSONL file, which is read once: it may be a pipe.

    categories: keep the questions of these alone; default: all. Of Spec-Bench its tasks count too.
    Returns (questions, what is wrong with the lines left out). Raises InputError for a file that
    cannot be read or has no question, for a category that it lacks, and for a failed download.
    """
    questions, problems = _parsed(spec)
    there = list(dict.fromkeys(question.group for question in questions))
    for name in categories:
        if name not in {question.category for question in questions} | {*there}:
            raise InputError(
                f"{spec} has no category {name!r}{nearest(name, there)}: {', '.join(there)}"
            )
    if categories:
        names = set(categories)
        questions = [q for q in questions if names & {q.category, q.group}]
    return questions, problems


def digest_of(questions: Sequence[Question]) -> str:
    """A SHA-256 of what is asked."""
    lines = json.dumps([(q.question_id, q.category, q.turns) for q in questions])
    return hashlib.sha256(lines.encode()).hexdigest()


def first_of_each(questions: Sequence[Question], count: int | None) -> list[Question]:
    """The first `count` questions of each category, of Spec-Bench each task; all for None."""
    seen: Counter[str] = Counter()
    chosen = []
    for question in questions:
        seen[question.group] += 1
        if count is None or seen[question.group] <= count:
            chosen.append(question)
    return chosen


def _parsed(spec: str) -> tuple[list[Question], list[str]]:
    """The question of each line, and what is wrong with the other lines."""
    name = spec if spec in SETS else Path(spec).name
    content = SETS[spec]() if spec in SETS else _file(spec)
    questions: dict[int | str, Question] = {}
    problems = []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            question = _question(line)
            if question.question_id in questions:
                raise ValueError(f"question_id {question.question_id!r} appears a second time")
            questions[question.question_id] = question
        except (ValueError, RecursionError) as error:
            problems.append(f"{name}:{number}: {error}")
    if not questions:
        raise InputError(f"no question in {spec}: {'; '.join(problems[:3]) or 'the file is empty'}")
    return list(questions.values()), problems


def _file(spec: str) -> bytes:
    """The content of a JSONL file. Raises InputError for anything else."""
    try:
        content = Path(spec).read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read questions from {spec}: {error.strerror}{nearest(spec, SETS)}; give "
            f"{either([*SETS, 'a JSONL file'])}"
        ) from error
    refuse_archive(Path(spec), content[:8])
    return content


def _question(line: bytes) -> Question:
    """Raises ValueError for a line that holds no question."""
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    question_id, turns = fields.get("question_id"), fields.get("turns")
    if not isinstance(question_id, int | str):
        raise ValueError("no `question_id`, a number or a text")
    if not (
        isinstance(turns, list)
        and turns
        and all(isinstance(turn, str) and turn.strip() for turn in turns)
    ):
        raise ValueError("no `turns`, a list of texts that are not empty")
    "".join(turns).encode()  # half of a surrogate pair is an error here, not later in the tokenizer
    check = check_of(fields["check"]) if "check" in fields else None
    category, task = (str(fields.get(*field)) for field in (("category", "general"), ("task", "")))
    return Question(question_id, category, tuple(turns), check, task)
