"""Load questions in FastChat's format: the builtin ones, a published suite, or a file."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass
from decimal import Decimal
from pathlib import Path
from typing import TypeGuard

from treespec.errors import InputError
from treespec.eval.speed_bench import check_published, list_user_turns, to_jsonl
from treespec.eval.suites import SUITES, load_suite
from treespec.options import QUESTION_SUITES, find_nearest_name, join_or

# questions that lie beside this module; MT-Bench's are FastChat's file, unchanged (Apache-2.0, see NOTICE)
INSTALLED_FILES = {
    "builtin": Path(__file__).with_name("builtin.jsonl"),
    "mt-bench": Path(__file__).with_name("mt-bench.jsonl"),
}
# 18, -3, 1,000, $2.50; the minus of 7-3 is no sign
NUMBER_PATTERN = re.compile(r"(?:(?<![\w)])-)?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def find_last_number(text: str) -> Decimal | None:
    """Find the last number in a text, without dollar signs and commas between thousands; None if there is none.

    It follows the `flexible-extract` filter of lm-evaluation-harness for GSM8K.
    """
    numbers = NUMBER_PATTERN.findall(text)
    if not numbers:
        return None
    return Decimal(re.sub(r"[$,]", "", numbers[-1]))


@dataclass(frozen=True)
class Question:
    """A conversation's user turns, asked one after the other.

    Attributes:
        question_id: unique in its file.
        category: as the file has it.
        turns: the user's messages.
        task: what results are grouped by instead of the category; "": the category.
        number: the number that a right completion of the last turn ends with; None: no right answer is known.
    """

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    task: str = ""
    number: str | None = None

    @property
    def group(self) -> str:
        return self.task or self.category

    def is_right(self, text: str) -> bool | None:
        """Whether a completion is right: 18, 18.00 and $18 are equal. None: no right answer is known."""
        if self.number is None:
            return None
        return find_last_number(text) == find_last_number(self.number)


def load_questions(
    spec: str = "builtin", categories: Collection[str] = ()
) -> tuple[list[Question], list[str]]:
    """Load questions.

    Args:
        spec: `builtin`, the name of a suite, or a JSONL or parquet file; the file is read once, so it may be a pipe.
        categories: keep only the questions of these categories or tasks of Spec-Bench; default: all.

    Returns:
        The questions, and for each line that was left out the reason.

    Raises:
        InputError: the file cannot be read or has no question, it lacks a category, or a download failed.
    """
    questions, problems = parse_questions(_read_turn_content(spec), Path(spec).name)
    if not questions:
        reason = "; ".join(problems[:3]) or "the file is empty"
        raise InputError(f"no question in {spec}: {reason}")
    if categories:
        questions = choose_categories(questions, categories, spec)
    return questions, problems


def parse_questions(content: bytes, name: str) -> tuple[list[Question], list[str]]:
    """Parse the questions of a JSONL file, and say what is wrong with its other lines. name: the file's, for these."""
    questions: dict[int | str, Question] = {}
    problems = []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            question = _parse_question(line)
            if question.question_id in questions:
                raise ValueError(f"question_id {question.question_id!r} appears a second time")
            questions[question.question_id] = question
        except (ValueError, RecursionError) as error:
            problems.append(f"{name}:{number}: {error}")
    return list(questions.values()), problems


def choose_categories(
    questions: Sequence[Question], categories: Collection[str], spec: str
) -> list[Question]:
    """Keep the questions of the given categories or tasks. Raises InputError for a category that `spec` lacks."""
    groups = dict.fromkeys(question.group for question in questions)
    group_names = set(groups) | {question.category for question in questions}
    for name in categories:
        if name not in group_names:
            raise InputError(
                f"{spec} has no category {name!r}{find_nearest_name(name, groups)}: {', '.join(groups)}"
            )
    matching_questions = []
    for question in questions:
        if question.category in categories or question.group in categories:
            matching_questions.append(question)
    return matching_questions


def hash_questions(questions: Sequence[Question]) -> str:
    """Compute the SHA-256 of all questions."""
    return hashlib.sha256(json.dumps(list(map(astuple, questions))).encode()).hexdigest()


def take_first_of_each(questions: Sequence[Question], count: int | None) -> list[Question]:
    """Keep the first `count` questions of each category or task of Spec-Bench; None keeps all."""
    counts: Counter[str] = Counter()
    first_questions = []
    for question in questions:
        counts[question.group] += 1
        if count is None or counts[question.group] <= count:
            first_questions.append(question)
    return first_questions


def _read_turn_content(spec: str) -> bytes:
    """Read the JSONL that `spec` names: a suite, `builtin` or a file. Raises InputError for anything else."""
    if spec in SUITES:
        return load_suite(spec)
    path = INSTALLED_FILES.get(spec, Path(spec))
    try:
        return to_jsonl(path.read_bytes())
    except OSError as error:
        choices = join_or([*QUESTION_SUITES, "a JSONL file"])
        nearest = find_nearest_name(spec, QUESTION_SUITES)
        raise InputError(
            f"cannot read questions from {spec}: {error.strerror}{nearest}; give {choices}"
        ) from error


def _parse_question(line: bytes) -> Question:
    """Parse the question of a JSONL line. Raises ValueError if the line has none."""
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    question_id = fields.get("question_id")
    if not isinstance(question_id, int | str):
        raise ValueError("no `question_id`, a number or a text")
    turns = fields.get("turns")
    if turns is None:
        turns = list_user_turns(fields.get("messages"))
    if not has_texts(turns):
        raise ValueError("no `turns`, a list of texts that are not empty")
    "".join(turns).encode()  # half of a surrogate pair is an error here, not later in the tokenizer
    check_published(turns)
    number = fields.get("number")
    if number is not None:
        number = str(number)
        if find_last_number(number) is None:
            raise ValueError(f"`number` holds no number: {number!r}")
    category = str(fields.get("category", "general"))
    task = str(fields.get("task", ""))
    return Question(question_id, category, tuple(turns), task, number)


def has_texts(turns: object) -> TypeGuard[list[str]]:
    """Whether an object is a list of at least one text, none of them blank."""
    if not isinstance(turns, list) or not turns:
        return False
    return all(isinstance(turn, str) and turn.strip() for turn in turns)
