"""Compute the figures of OUT/report.json from the ledger: a row for each contestant, and fields of all.

options, environment, left_out: of the ledger's head. timed: False where several processes
shared the machine. questions: their number. few_questions: categories with too few of them for their
intervals. failed: why a peer has no figures, by its name. again: contestants that were asked a
second time (A/A), with the `compute_figures` of that over the first.

A row has the fields of its `System`, and:

    lossless       whether the completions have the target's distribution
    overall        `compute_figures` of all questions
    categories     `compute_figures` by category, by task for Spec-Bench
    by_generate    tokens/s over those of `model.generate`
    same           turns of temperature 0 with the baseline's tokens, of a server with its text
    turns, ended   the number of turns; by what ended them
    right          None if no question has a right answer. answers: completions of questions that have one.
                   right: how many of them are right. share: right by answers. same: as right as the baseline's
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from treespec.errors import InputError
from treespec.eval.config import EvalConfig
from treespec.eval.intervals import (
    MIN_QUESTIONS,
    Array,
    Figure,
    compute_interval,
    leave_one_out,
    share_of,
)
from treespec.eval.ledger import Completion, Ledger
from treespec.eval.systems import BASELINE_NAME, GENERATE_METHOD, System

CYCLE_PARTS = (
    "draft model",
    "rest of drafting",
    "target",
    "verify",
    "commit",
    "rest",
)  # of a cycle

Id = int | str  # of a question
Completions = Mapping[Id, Completion]  # a contestant's
Row = dict[str, Any]
Summary = dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """The content of a ledger.

    systems: the contestants that were asked. completions: by a system's name and question; a question whose first turn
    does not fit the context has none. failed: why a peer gave up, by its name.
    """

    systems: Sequence[System]
    completions: Mapping[str, dict[Id, Completion]]
    failed: Mapping[str, str]

    def collect_groups(self) -> dict[str, list[Id]]:
        """The questions that every system has completed, but for peers that failed: "overall", then by group."""
        # 1. Those of all systems.
        counted_systems = []
        for system in self.systems:
            if not system.again and system.name not in self.failed:
                counted_systems.append(self.completions[system.name])
        first_system = counted_systems[0]
        questions = []
        for question in first_system:
            if all(question in completions for completions in counted_systems):
                questions.append(question)

        # 2. By category or task.
        groups = {"overall": list(questions)}
        for question in questions:
            groups.setdefault(first_system[question]["group"], []).append(question)
        return groups

    def list_failed(self, questions: Iterable[Id]) -> dict[str, str]:
        """Why peers have no figures, by name: those that gave up before they had completed all these questions."""
        failed = {}
        for name, reason in self.failed.items():
            if not self.completions[name].keys() >= set(questions):
                failed[name] = reason
        return failed

    def find_plain(self, method: str, system: System) -> Completions | None:
        """The completions by a plain method at a system's temperature and batch size; None if they are its own."""
        plain = None
        for other in self.systems:
            is_like_it = (other.temperature, other.batch) == (system.temperature, system.batch)
            if other.method == method and is_like_it and not other.again:
                plain = other
        if plain is None or plain == system:
            return None
        return self.completions[plain.name]


def read_evaluation(ledger: Ledger, timed: bool) -> Evaluation:
    """Read the content of a ledger. timed: whether the seconds of completions count."""
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
    """Compute the figures of an evaluation, from its ledger alone.

    Only questions that every contestant has completed count, but for peers that failed. Raises
    InputError if there is none.
    """
    # 1. Completions, and the questions that count.
    head = ledger.head
    if head is None:
        raise InputError(f"{ledger.file} holds no evaluation")
    config = EvalConfig(**head["options"])
    timed = head["processes"] == 1
    evaluation = read_evaluation(ledger, timed)
    groups = evaluation.collect_groups()
    questions = groups["overall"]
    if not questions:
        raise InputError(
            f"{config.out}: no question is completed; is every one longer than the target's context?"
        )
    failed = evaluation.list_failed(questions)

    # 2. A row for each contestant, and one for the baseline's second time.
    rows = []
    again = []
    for system in evaluation.systems:
        if system.name in failed:
            continue
        if not system.again:
            rows.append(compare_system(system, evaluation, groups))
        else:
            repeated = compare_repeat(system, evaluation)
            if repeated:
                again.append(repeated)
    return {
        "options": head["options"],
        "environment": head["environment"],
        "left_out": head["left_out"],
        "timed": timed,
        "questions": len(questions),
        "few_questions": [name for name, chosen in groups.items() if len(chosen) < MIN_QUESTIONS],
        "again": again,
        "rows": rows,
        "failed": failed,
    }


def compare_system(
    system: System, evaluation: Evaluation, groups: Mapping[str, Sequence[Id]]
) -> Row:
    """The row of a contestant in the report. groups: of questions, by name."""
    completions = evaluation.completions[system.name]
    base = evaluation.find_plain(BASELINE_NAME, system)
    generate = evaluation.find_plain(GENERATE_METHOD, system)
    row = asdict(system) | build_figure_row(system, completions, base, groups)
    row["lossless"] = system.lossless
    row["by_generate"] = compute_subset_figures(completions, generate, groups["overall"])["speedup"]
    return row


def compare_repeat(system: System, evaluation: Evaluation) -> Row | None:
    """The row of the baseline's second time, over its first; None if no question was completed both times."""
    completions = evaluation.completions[system.name]
    base = evaluation.find_plain(BASELINE_NAME, system) or {}
    both = [question for question in completions if question in base]
    if not both:
        return None
    return asdict(system) | compute_subset_figures(completions, base, both)


def build_figure_row(
    system: System,
    completions: Completions,
    base: Completions | None,
    groups: Mapping[str, Sequence[Id]],
) -> Row:
    """Compute the figures of a contestant, by itself and beside plain decoding.

    Args:
        system: the contestant.
        completions: its own, by question.
        base: the baseline's; None for the baseline itself, and without one.
        groups: the questions that count, by group; "overall" has all.
    """
    by_group = {
        name: compute_subset_figures(completions, base, chosen) for name, chosen in groups.items()
    }
    questions = groups["overall"]
    ends = []
    for question in questions:
        ends += completions[question]["ended"]
    same = None
    if system.temperature == 0 and base is not None:
        same = count_same_turns(completions, base, questions)
    return {
        "overall": by_group.pop("overall"),
        "categories": by_group,
        "same": same,
        "turns": len(ends),
        "ended": {end: ends.count(end) for end in ("model", "max_new_tokens", "context")},
        "right": count_right(completions, base, questions),
    }


def count_same_turns(completions: Completions, base: Completions, questions: Sequence[Id]) -> int:
    """The turns with the baseline's tokens; with its text if the contestant is a server, which tells no ids."""
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
    """How many answers are right, and as right as the baseline's; None if no question has a right answer."""
    judged = [question for question in questions if completions[question]["right"] is not None]
    if not judged:
        return None
    right = sum(completions[question]["right"] for question in judged)
    same = None
    if base:
        same = sum(completions[i]["right"] == base[i]["right"] for i in judged)
    share = share_of(right, len(judged))
    return {"answers": len(judged), "right": right, "share": share, "same": same}


def compute_subset_figures(
    completions: Completions, base: Completions | None, chosen: Sequence[Id]
) -> Row:
    """Compute the `compute_figures` of some questions."""
    base_chosen = None
    if base is not None:
        base_chosen = [base[i] for i in chosen]
    return compute_figures([completions[i] for i in chosen], base_chosen)


def compute_figures(completions: Sequence[Completion], base: Sequence[Completion] | None) -> Row:
    """Compute the figures of one contestant from its completions of Q questions.

    The jackknife leaves out whole questions, because the tokens and cycles of one completion are not
    independent, and of a contestant and its baseline the same. Every figure is a ratio of totals over
    questions.

    Args:
        completions: those of the contestant.
        base: the baseline's, of the same questions in the same order.

    Returns:
        `Figure`s: acceptance_length τ, tokens per cycle; acceptance_rate_by_depth, the share of the
        cycles with an accepted token at the depth above that accepted one at this depth; tokens_per_second by
        the clock; speedup, tokens/s over the baseline's; decoding_speedup, without prefill; bound, that, if a
        cycle cost only its forwards. And numbers: questions, tokens, cycles, seconds; nodes, the mean size of
        the tree of one forward, with its root; undrafted, the share of the cycles without a draft token;
        prefill_seconds; cycle_ms by stage; first_token, mean seconds to the first token: of treespec the prefill
        and a cycle, of a server as its client sees it, of transformers None.
    """
    weights = leave_one_out(len(completions))
    sums = sum_completions(completions, weights)
    base_sums = None
    if base is not None:
        base_sums = sum_completions(base, weights)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = compute_ratios(sums, base_sums)
        rates = compute_depth_rates(completions, sums["cycles"], weights)
        value = {name: samples[0] for name, samples in sums.items()}
        cycles = value["cycles"]
        cycle_ms = {stage: 1000 * value[stage] / cycles for stage in CYCLE_PARTS}
        return {
            **ratios,
            "acceptance_rate_by_depth": rates,
            "questions": len(completions),
            "tokens": int(value["new_tokens"]),
            "cycles": int(cycles),
            "seconds": value["wall"],
            "nodes": 1 + value["drafted"] / cycles,
            "undrafted": value["undrafted"] / cycles,
            "prefill_seconds": value["prefill"],
            "cycle_ms": cycle_ms,
            "first_token": find_first_token_seconds(completions, value["prefill"], cycle_ms),
        }


def compute_ratios(
    sums: Mapping[str, Array], base: Mapping[str, Array] | None
) -> dict[str, Figure | None]:
    """The ratios of totals of `compute_figures`; None for those that need the baseline, without one."""
    tokens = sums["new_tokens"]
    wall = sums["wall"]
    ratios: dict[str, Figure | None] = {"speedup": None, "decoding_speedup": None, "bound": None}
    if base is not None:
        one_token = 1 / base["new_tokens"]  # its share of plain decoding
        ratios["speedup"] = compute_interval(tokens / wall * base["wall"] * one_token)
        decoding = (base["wall"] - base["prefill"]) * one_token
        ratios["decoding_speedup"] = compute_interval(tokens / (wall - sums["prefill"]) * decoding)
        forward = base["target"] / base["cycles"]
        ratios["bound"] = compute_interval(
            tokens / (sums["target"] + sums["draft model"]) * forward
        )
    ratios["acceptance_length"] = compute_interval(tokens / sums["cycles"])
    ratios["tokens_per_second"] = compute_interval(tokens / wall)
    return ratios


def compute_depth_rates(
    completions: Sequence[Completion], cycles: Array, weights: Array
) -> list[Figure]:
    """By depth, the share of the cycles that came so far that accepted one token more. A depth without any has none.

    cycles: [1 + Q] totals. weights: [1 + Q, Q].
    """
    rates = []
    reached = cycles
    counts_by_question = [completion["accepted"] for completion in completions]
    for counts in zip_longest(*counts_by_question, fillvalue=0):
        accepted = weights @ np.array(counts, dtype=float)
        rates.append(compute_interval(accepted / reached, most=1.0))
        reached = accepted
    return rates


def find_first_token_seconds(
    completions: Sequence[Completion], prefill: float, cycle_ms: Mapping[str, float]
) -> float | None:
    """Mean seconds to the first token of a turn. prefill: seconds of all turns. cycle_ms: of a cycle, by stage."""
    turns = sum(len(completion["turns"]) for completion in completions)
    seconds = sum(completion["seconds"].get("first", 0.0) for completion in completions) / turns
    if sum(sum(completion["cycles"]) for completion in completions):
        seconds = prefill / turns + sum(cycle_ms.values()) / 1000
    return seconds or None


def sum_completions(completions: Sequence[Completion], weights: Array) -> dict[str, Array]:
    """[1 + Q] totals of `count_completion` by rows of weights [1 + Q, Q]."""
    rows = [count_completion(completion) for completion in completions]
    sums = {}
    for name in rows[0]:
        sums[name] = weights @ np.array([row[name] for row in rows], dtype=float)
    return sums


def count_completion(completion: Completion) -> dict[str, float]:
    """Tokens, cycles and seconds of one completion, in all and by stage.

    The stages and the prefill add up to `wall`.
    """
    # 1. Seconds by stage.
    seconds = completion["seconds"]
    counts = {}
    for stage in ("prefill", "target", "verify", "commit"):
        counts[stage] = seconds.get(stage, 0.0)
    counts["draft model"] = seconds.get("head", 0.0)
    counts["rest of drafting"] = seconds.get("draft", 0.0) - counts["draft model"]
    spent = sum(counts.values())

    # 2. Sums over turns, and what no stage took.
    for name in ("wall", "new_tokens", "cycles", "drafted"):
        counts[name] = sum(completion[name])
    counts["rest"] = counts["wall"] - spent
    counts["undrafted"] = completion["undrafted"]
    return counts
