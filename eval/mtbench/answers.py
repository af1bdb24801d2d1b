"""Answer files in the format of FastChat and Spec-Bench, one line a question."""

import json
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treespec.errors import InputError
from treespec.heads import checksum
from treespec.stats import figures

BROKEN = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    RecursionError,
)  # what a damaged line raises


@dataclass(frozen=True)
class Answer:
    """What one configuration answered to one question.

    turns, decoding_steps, new_tokens, wall_time (seconds): one entry a turn. accept_lengths: tokens committed
    by each cycle, all turns in one list. extra: anything else as JSON; FastChat and Spec-Bench pass over it.
    Format: fastchat.llm_judge.gen_model_answer, Spec-Bench's evaluation/eval.py.
    """

    question_id: int | str
    category: str
    model_id: str
    turns: Sequence[str]
    decoding_steps: Sequence[int] = ()
    new_tokens: Sequence[int] = ()
    wall_time: Sequence[float] = ()
    accept_lengths: Sequence[int] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    answer_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    tstamp: float = field(default_factory=time.time)


def append(path: str | Path, answer: Answer) -> None:
    """Adds one line with its checksum and has it on the disk before it returns: a kill loses at most that line.

    What `read` leaves out of the end is cut off first. Raises InputError where the file cannot be written.
    """
    line = json.dumps(checksum.sealed(_to_json(answer))) + "\n"
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("ab+") as file:
            file.seek(0)
            file.truncate(whole(file.read()))
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror or error}; the answers before this one are kept: make room, and "
            "repeat the command to go on"
        ) from error


def read(path: str | Path) -> list[Answer]:
    """The answers of a file, in order; none if there is no such file. A half-written or damaged last line is left out.

    Raises InputError, with the line's number, for any other line that is not an answer.
    """
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"cannot read the answers in {path}: {error.strerror}") from error
    answers = []
    for number, line in enumerate(content[: whole(content)].split(b"\n")[:-1], 1):
        try:
            answers.append(_from_line(line))
        except BROKEN as error:
            raise InputError(
                f"{path}:{number} is not an answer line ({type(error).__name__}: {error}); "
                "delete the line to have its question answered again"
            ) from error
    return answers


def whole(content: bytes) -> int:
    """How many bytes of a file are lines, without a last one that a kill has cut or that is damaged."""
    end = content.rfind(b"\n") + 1
    start = content.rfind(b"\n", 0, max(end - 1, 0)) + 1
    try:
        _from_line(content[start:end])
    except BROKEN:
        return start
    return end


def said(answer: Answer, explain: bool) -> str:
    """A step's line: which question was answered by what, and its figures."""
    spent = figures(
        sum(answer.new_tokens), sum(answer.decoding_steps), sum(answer.wall_time), explain
    )
    return f"question {answer.question_id}, {answer.model_id}: {spent}"


def _from_line(line: bytes) -> Answer:
    """Raises one of BROKEN for what is no answer, or not the one that was written."""
    fields = json.loads(line)
    if not checksum.intact(fields):
        raise ValueError("its checksum does not match")
    return _from_json(fields)


def _to_json(answer: Answer) -> dict[str, Any]:
    choice = {
        "index": 0,
        "turns": list(answer.turns),
        "decoding_steps": list(answer.decoding_steps),
        "new_tokens": list(answer.new_tokens),
        "wall_time": list(answer.wall_time),
        "accept_lengths": list(answer.accept_lengths),
    }
    line = {
        "question_id": answer.question_id,
        "category": answer.category,
        "answer_id": answer.answer_id,
        "model_id": answer.model_id,
        "choices": [choice],
        "tstamp": answer.tstamp,
    }
    return line | ({"extra": answer.extra} if answer.extra else {})


def _from_json(line: dict[str, Any]) -> Answer:
    """Raises one of BROKEN for what is no answer; older lines have no checksum that would tell."""
    choice = line["choices"][0]
    for name in ("turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"):
        kind = str if name == "turns" else (int, float)
        if not all(isinstance(value, kind) for value in choice.get(name, [])):
            raise TypeError(f"{name} are not what they should be")
    return Answer(
        question_id=line["question_id"],
        category=line.get("category", ""),  # FastChat's own answers have no category and no counts
        model_id=line["model_id"],
        turns=choice["turns"],
        decoding_steps=choice.get("decoding_steps", []),
        new_tokens=choice.get("new_tokens", []),
        wall_time=choice.get("wall_time", []),
        accept_lengths=choice.get("accept_lengths", []),
        extra=line.get("extra", {}),
        answer_id=line["answer_id"],
        tstamp=line["tstamp"],
    )
