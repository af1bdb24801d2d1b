"""Compute the figures of OUT/report.json from the ledger: a row for each system, and fields about all of them.

The fields about all systems:

    options, environment, left_out    as in the ledger's head
    date             first and last day of the completions
    timed            whether the seconds count; not if several processes shared the machine
    questions        number of questions
    few_questions    categories with fewer than `MIN_QUESTIONS` questions, too few for their intervals
    failed           for each peer without figures the reason
    again            for each system that was asked a second time (A/A) its row, relative to the first time
    rows             a row for each system

A row has the fields of its `System`, and:

    lossless       whether the completions have the target's distribution
    overall        `compute_figures` of all questions
    categories     `compute_figures` by category, by task for Spec-Bench
    by_generate    tokens/s relative to `model.generate`
    same           at temperature 0, turns with the baseline's tokens (for a server: with its text)
    turns, ended   number of turns; the same by what ended them
    right          None if no question has a right answer. answers: completions of questions that have one.
                   right: number of right ones. share: right / answers. same: those judged as the baseline's
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from treespec.errors import InputError
from treespec.eval.header import format_days
from treespec.eval.intervals import MIN_QUESTIONS, share_of
from treespec.eval.ledger import Completion, Ledger
from treespec.eval.system_figures import compute_figures
from treespec.eval.systems import BASELINE_NAME, GENERATE_METHOD, System

Id = int | str  # a question's `question_id`
Completions = Mapping[Id, Completion]  # a system's completions by question
Row = dict[str, Any]  # a system's figures
Summary = dict[str, Any]  # the content of OUT/report.json


@dataclass(frozen=True)
class Evaluation:
    """The content of a ledger.

    Attributes:
        systems: the systems that were asked.
        completions: by system's name, then by question. A question that does not fit the context has none.
        failed: for each peer that gave up the reason, by its name.
    """

    systems: Sequence[System]
    completions: Mapping[str, dict[Id, Completion]]
    failed: Mapping[str, str]

    def collect_groups(self) -> dict[str, list[Id]]:
        """Collect the questions that all systems, except failed peers, have completed: "overall", then by group."""
        # 1. The questions that every system has completed.
        counted_systems = []
        for system in self.systems:
            if not system.again and system.name not in self.failed:
                counted_systems.append(self.completions[system.name])
        first_system = counted_systems[0]
        questions = []
        for question in first_system:
            if all(question in completions for completions in counted_systems):
                questions.append(question)

        # 2. The same by category or task.
        groups = {"overall": list(questions)}
        for question in questions:
            groups.setdefault(first_system[question]["group"], []).append(question)
        return groups

    def list_failed(self, questions: Iterable[Id]) -> dict[str, str]:
        """List the peers that gave up before they had completed all these questions, each with the reason."""
        failed = {}
        for name, reason in self.failed.items():
            if not self.completions[name].keys() >= set(questions):
                failed[name] = reason
        return failed

    def find_plain(self, method: str, system: System) -> Completions | None:
        """Find the completions of a plain method at a system's temperature and batch size; None without another one."""
        plain_system = None
        for candidate in self.systems:
            has_same_settings = (candidate.temperature, candidate.batch) == (
                system.temperature,
                system.batch,
            )
            if candidate.method == method and has_same_settings and not candidate.again:
                plain_system = candidate
        if plain_system is None or plain_system == system:
            return None
        return self.completions[plain_system.name]


def read_evaluation(ledger: Ledger, timed: bool) -> Evaluation:
    """Read the content of a ledger. timed: whether the completions' seconds count; else they become NaN."""
    head = ledger.head
    assert head
    systems = [System(**fields) for fields in head["contestants"]]
    completions: dict[str, dict[Id, Completion]] = {system.name: {} for system in systems}
    for entry in ledger.list_entries("completion"):
        if sum(entry["new_tokens"]):
            if not timed:
                entry = entry | {"wall": [math.nan]}
            completions[entry["contestant"]][entry["question_id"]] = entry
    failed = {entry["contestant"]: entry["why"] for entry in ledger.list_entries("failed")}
    return Evaluation(systems, completions, failed)


def summarize_ledger(ledger: Ledger) -> Summary:
    """Compute the figures of an evaluation from its ledger; no model is needed.

    Only questions count that all systems, except failed peers, have completed. Raises InputError if there is none.
    """
    # 1. Completions, and the questions that count.
    head = ledger.head
    if head is None:
        raise InputError(f"{ledger.file} holds no evaluation")
    timed = head["processes"] == 1
    evaluation = read_evaluation(ledger, timed)
    groups = evaluation.collect_groups()
    questions = groups["overall"]
    if not questions:
        raise InputError(
            f"{head['options']['out']}: no question is completed; is every one longer than the target's context?"
        )
    failed = evaluation.list_failed(questions)

    # 2. A row for each system, and one for the baseline's repeat.
    rows = []
    repeat_rows = []
    for system in evaluation.systems:
        if system.name in failed:
            continue
        if not system.again:
            rows.append(compare_system(system, evaluation, groups))
        else:
            repeat_row = compare_repeat(system, evaluation)
            if repeat_row:
                repeat_rows.append(repeat_row)
    return {
        "options": head["options"],
        "environment": head["environment"],
        "date": format_days(entry["time"] for entry in ledger.list_entries("completion")),
        "left_out": head["left_out"],
        "timed": timed,
        "questions": len(questions),
        "few_questions": [name for name, ids in groups.items() if len(ids) < MIN_QUESTIONS],
        "again": repeat_rows,
        "rows": rows,
        "failed": failed,
    }


def compare_system(
    system: System, evaluation: Evaluation, groups: Mapping[str, Sequence[Id]]
) -> Row:
    """Make a system's row in the report. groups: the questions that count, by group."""
    completions = evaluation.completions[system.name]
    base = evaluation.find_plain(BASELINE_NAME, system)
    generate = evaluation.find_plain(GENERATE_METHOD, system)
    row = asdict(system) | build_figure_row(system, completions, base, groups)
    row["lossless"] = system.lossless
    row["by_generate"] = compute_subset_figures(completions, generate, groups["overall"])["speedup"]
    return row


def compare_repeat(system: System, evaluation: Evaluation) -> Row | None:
    """Make the row of the baseline's repeat relative to its first time; None if no question was completed twice."""
    completions = evaluation.completions[system.name]
    base = evaluation.find_plain(BASELINE_NAME, system) or {}
    common_questions = [question for question in completions if question in base]
    if not common_questions:
        return None
    return asdict(system) | compute_subset_figures(completions, base, common_questions)


def build_figure_row(
    system: System,
    completions: Completions,
    base: Completions | None,
    groups: Mapping[str, Sequence[Id]],
) -> Row:
    """Compute the figures of a system, and its speedup over plain decoding.

    Args:
        system: the system.
        completions: its completions by question.
        base: the baseline's completions; None without a baseline, or if the system is the baseline.
        groups: the questions that count, by group; "overall" has all of them.
    """
    by_group = {
        name: compute_subset_figures(completions, base, group_questions)
        for name, group_questions in groups.items()
    }
    questions = groups["overall"]
    ends = []
    for question in questions:
        ends += completions[question]["ended"]
    same_turns = None
    if system.temperature == 0 and base is not None:
        same_turns = count_same_turns(completions, base, questions)
    return {
        "overall": by_group.pop("overall"),
        "categories": by_group,
        "same": same_turns,
        "turns": len(ends),
        "ended": {end: ends.count(end) for end in ("model", "max_new_tokens", "context")},
        "right": count_right(completions, base, questions),
    }


def count_same_turns(completions: Completions, base: Completions, questions: Sequence[Id]) -> int:
    """Count the turns with the baseline's tokens; for a server, which reports no ids, those with its text."""
    field = "turns"
    if any(completions[questions[0]]["token_ids"]):
        field = "token_ids"
    same = 0
    for question in questions:
        turns = zip(completions[question][field], base[question][field], strict=True)
        same += sum(turn == plain_turn for turn, plain_turn in turns)
    return same


def count_right(
    completions: Completions, base: Completions | None, questions: Sequence[Id]
) -> Row | None:
    """Count the right answers, and those right or wrong as the baseline's; None if no question has a right answer."""
    judged_questions = [
        question for question in questions if completions[question]["right"] is not None
    ]
    if not judged_questions:
        return None
    right = sum(completions[question]["right"] for question in judged_questions)
    same_verdicts = None
    if base:
        same_verdicts = sum(completions[i]["right"] == base[i]["right"] for i in judged_questions)
    share = share_of(right, len(judged_questions))
    return {"answers": len(judged_questions), "right": right, "share": share, "same": same_verdicts}


def compute_subset_figures(
    completions: Completions, base: Completions | None, questions: Sequence[Id]
) -> Row:
    """Call `compute_figures` with the completions of some questions."""
    base_completions = None
    if base is not None:
        base_completions = [base[question] for question in questions]
    return compute_figures([completions[question] for question in questions], base_completions)
