"""Answer files in the format of FastChat and Spec-Bench, one line per question."""

import json
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from treespec.errors import InputError
from treespec.eval.mtbench.result import Extra
from treespec.heads import checksum

# What parsing a damaged line raises.
BROKEN = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Answer:
    """One configuration's answer to one question.

    turns, decoding_steps (cycles), new_tokens, wall_time (seconds): one entry per turn.
    accept_lengths: tokens committed by each cycle, all turns in one list. extra: see `Extra`.
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
    extra: Extra = field(default_factory=lambda: Extra())
    answer_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    tstamp: float = field(default_factory=time.time)


def append(path: str | Path, answer: Answer) -> None:
    """Add one line with its checksum. It is on the disk when this returns: a kill loses no other.

    A damaged end of the file, which `read` skips, is cut off first. Raises InputError where the
    file cannot be written.
    """
    line = json.dumps(checksum.sealed(_to_json(answer))) + "\n"
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("ab+") as file:
            file.seek(0)
            file.truncate(intact_bytes(file.read()))
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror or error}; the answers before this one are "
            "kept: make room, and repeat the command to go on"
        ) from error


def read(path: str | Path) -> list[Answer]:
    """The answers of a file, in order; none if the file is missing.

    A last line that is cut off or damaged is skipped. Raises InputError, with the line's number,
    for any other line that is not an answer.
    """
    # 1. The intact lines.
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"cannot read the answers in {path}: {error.strerror}") from error
    lines = content[: intact_bytes(content)].split(b"\n")[:-1]

    # 2. The answer of each.
    answers = []
    for number, line in enumerate(lines, 1):
        try:
            answers.append(_from_line(line))
        except BROKEN as error:
            raise InputError(
                f"{path}:{number} is not an answer line ({type(error).__name__}: {error}); "
                "delete the line to have its question answered again"
            ) from error
    return answers


def intact_bytes(content: bytes) -> int:
    """The length of a file's content without a last line that is cut off or damaged."""
    end = content.rfind(b"\n") + 1
    start = content.rfind(b"\n", 0, max(end - 1, 0)) + 1
    try:
        _from_line(content[start:end])
    except BROKEN:
        return start
    return end


def _from_line(line: bytes) -> Answer:
    """The answer of a line. Raises one of BROKEN for a line that was not written so."""
    fields = json.loads(line)
    if not checksum.intact(fields):
        raise ValueError("its checksum does not match")
    return _from_json(fields)


def _to_json(answer: Answer) -> dict[str, object]:
    """The line's fields; `extra` only where there is something in it."""
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
    """Raises one of BROKEN for anything but an answer.

    FastChat's own answers have no category, no counts and no checksum, so the types of the parts are
    checked here.
    """
    # 1. The types.
    choice = line["choices"][0]
    for name in ("turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"):
        kind = str if name == "turns" else (int, float)
        if not all(isinstance(value, kind) for value in choice.get(name, [])):
            raise TypeError(f"{name} are not what they should be")

    # 2. The answer.
    return Answer(
        question_id=line["question_id"],
        category=line.get("category", ""),
        model_id=line["model_id"],
        turns=choice["turns"],
        decoding_steps=choice.get("decoding_steps", []),
        new_tokens=choice.get("new_tokens", []),
        wall_time=choice.get("wall_time", []),
        accept_lengths=choice.get("accept_lengths", []),
        extra=cast(Extra, line.get("extra", {})),
        answer_id=line["answer_id"],
        tstamp=line["tstamp"],
    )
