"""Which answers are right: a suite's checks on the answers of every configuration, kept in OUT."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from treespec.eval.common import Step
from treespec.eval.mtbench.answers import Answer, read
from treespec.eval.suites.checks import Check
from treespec.files.atomic import read_json, write_json

# {"checks": a digest of the checks, "right": {answer_id: whether it is right}}
FILE = "right.json"


def judge(
    out: Path,
    files: Iterable[Path],
    checks: Mapping[int | str, Check],
    run_code: bool,
    report: Callable[[Step], None],
) -> None:
    """Check the last turn of every answer that was not checked before, and keep the verdicts.

    files: of answers. checks: of all questions; others than before judge all answers anew.
    run_code: also take checks that run what the target wrote. An answer of the same words to the
    same question is checked once.
    """
    # 1. The answers that can be checked.
    usable = {i: check for i, check in checks.items() if run_code or not check.runs_code}
    asked = [answer for file in files for answer in read(file) if answer.question_id in usable]

    # 2. Verdicts: earlier ones stay, if the checks are the same.
    digest = hashlib.sha256(repr(list(checks.items())).encode()).hexdigest()
    held = kept(out)
    before = held["right"] if held.get("checks") == digest else {}
    right = {a.answer_id: before[a.answer_id] for a in asked if a.answer_id in before}
    by_words = {_words(a): right[a.answer_id] for a in asked if a.answer_id in right}
    for number, answer in enumerate(asked):
        if answer.answer_id in right:
            continue
        if _words(answer) not in by_words:
            report(Step(number, len(asked), f"checking the answer to {answer.question_id}"))
            by_words[_words(answer)] = usable[answer.question_id].right(answer.turns[-1])
        right[answer.answer_id] = by_words[_words(answer)]
    fields = {"checks": digest, "right": before | right}
    if fields != held and (right or held["right"]):
        write_json(out / FILE, fields)


def verdicts(out: Path) -> dict[str, bool]:
    """Whether an answer is right, by its `answer_id`; empty where nothing was checked."""
    right: dict[str, bool] = kept(out)["right"]
    return right


def kept(out: Path) -> dict[str, Any]:
    """The fields of OUT/right.json. Without the file there are no verdicts."""
    file = out / FILE
    if not file.exists():
        return {"right": {}}
    return read_json(file, "delete it to have answers checked again")


def _words(answer: Answer) -> tuple[int | str, str]:
    return answer.question_id, answer.turns[-1]
