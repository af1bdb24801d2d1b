"""Questions in FastChat's format: our own, MT-Bench's, or a file's."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from treespec.errors import InputError

BUILTIN = Path(__file__).with_name("builtin.jsonl")
MT_BENCH = ("lmsys/mt-bench", "data/mt_bench/question.jsonl")  # FastChat's Space on the Hub


@dataclass(frozen=True)
class Question:
    """A conversation's user turns, asked one after the other."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]


def load_questions(spec: str = "builtin") -> tuple[list[Question], list[str]]:
    """(questions, what is wrong with the lines left out) of one of `SETS` or of a JSONL file.

    Raises InputError for a file that cannot be read or has no question, and for a failed download.
    """
    # 1. The lines of the file.
    path = SETS[spec]() if spec in SETS else Path(spec)
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise InputError(
            f"cannot read questions from {spec}: {error.strerror}; give `builtin`, `mt-bench` or a JSONL file"
        ) from error

    # 2. The question of each line, or what is wrong with it.
    questions: dict[int | str, Question] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            question = _question(json.loads(line))
            if question.question_id in questions:
                raise ValueError(f"question_id {question.question_id!r} appears a second time")
            questions[question.question_id] = question
        except ValueError as error:
            problems.append(f"{path.name}:{number}: {error}")
    if not questions:
        raise InputError(f"no question in {spec}: {'; '.join(problems[:3]) or 'the file is empty'}")
    return list(questions.values()), problems


def _question(line: object) -> Question:
    if not isinstance(line, dict):
        raise ValueError("not a JSON object")
    question_id, turns = line.get("question_id"), line.get("turns")
    if not isinstance(question_id, int | str):
        raise ValueError("no `question_id`, a number or a text")
    if not (
        isinstance(turns, list)
        and turns
        and all(isinstance(turn, str) and turn.strip() for turn in turns)
    ):
        raise ValueError("no `turns`, a list of texts that are not empty")
    "".join(turns).encode()  # half of a surrogate pair is an error here, not later in the tokenizer
    return Question(question_id, str(line.get("category", "general")), tuple(turns))


def _mt_bench() -> Path:
    """The 80 questions, downloaded at the first use and kept in the Hugging Face cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    space, file = MT_BENCH
    try:
        return Path(hf_hub_download(space, file, repo_type="space", local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(hf_hub_download(space, file, repo_type="space"))
    except (OSError, EntryNotFoundError) as error:
        raise InputError(
            f"MT-Bench is not in the Hugging Face cache and cannot be downloaded from {space} "
            f"({type(error).__name__}); pass `--questions FILE` with a copy of its question.jsonl, "
            "which FastChat's repository has too, or `--questions builtin`"
        ) from error


SETS: dict[str, Callable[[], Path]] = {"builtin": lambda: BUILTIN, "mt-bench": _mt_bench}
