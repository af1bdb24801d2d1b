"""From the ledger to the figures in OUT/report.json: a row for each contestant, and what they share.

options, environment, machine, left_out: of the ledger's head. timed: False where several processes
shared the machine. questions: their number. few_questions: categories with too few of them for their
intervals. failed: why a peer has no figures, by its name. forwards: of `forward_times`. again: of the
baseline's second time (A/A), by temperature and batch: its questions, and its speedup over the first.

A row has the fields of its `Contestant`, and:

    lossless       whether the completions have the target's distribution
    overall        `Figures` of all questions
    categories     `Figures` by category, by task for Spec-Bench
    by_generate    tokens/s over those of `model.generate`
    of_fastest     tokens/s over those of the fastest lossless pair; None for that one
    over_smallest  tokens/s over those of the same contestant with the smallest batch
    same           turns of temperature 0 with the baseline's tokens, of a server with its text
    turns, ended   the number of turns; by what ended them
    right          `Right`; None where no completion was checked
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from treespec.errors import InputError
from treespec.eval.bootstrap import interval, resample
from treespec.eval.config import EvalConfig
from treespec.eval.contestants import BASELINE, GENERATE, Contestant, contestants
from treespec.eval.figures import Figures, figures, speed_of
from treespec.eval.ledger import Completion, Ledger
from treespec.eval.questions import task_of
from treespec.eval.right import right_of, verdicts
from treespec.eval.verdict import FEW

RESAMPLES = 1000

Completions = dict[int | str, Completion]  # by question
Row = dict[str, Any]
Summary = dict[str, Any]


def summarise(ledger: Ledger) -> Summary:
    """The figures of an evaluation, from its ledger alone.

    Only questions that every contestant has completed count, but for peers that failed. Raises
    InputError if there is none.
    """
    # 1. Completions by contestant and question; those whose first turn did fit the context.
    head = ledger.head
    if head is None:
        raise InputError(f"{ledger.file} holds no evaluation")
    config, timed = EvalConfig(**head["options"]), head["processes"] == 1
    asked = [one for one in contestants(config) if one.name not in head["unfit"]]
    every: dict[str, Completions] = {one.name: {} for one in asked}
    for entry in (entry for entry in ledger.of("completion") if sum(entry["new_tokens"])):
        wall = [seconds if timed else math.nan for seconds in entry["wall"]]
        every[entry["contestant"]][entry["question_id"]] = entry | {"wall": wall}

    # 2. The questions that count, and their groups.
    failed = {entry["contestant"]: entry["why"] for entry in ledger.of("failed")}
    first, *others = (every[o.name] for o in asked if not o.again and o.name not in failed)
    questions = [i for i in first if all(i in other for other in others)]
    if not questions:
        raise InputError(
            f"{config.out}: no question is completed; is every one longer than the target's context?"
        )
    groups: dict[str, list[int | str]] = {}
    for i in questions:
        groups.setdefault(task_of(config.questions, first[i]["category"]), []).append(i)
    failed = {name: why for name, why in failed.items() if not every[name].keys() >= {*questions}}

    # 3. A row for each contestant, and one for the baseline's second time.
    judged, rows, again = verdicts(ledger), [], []
    plain = [o for o in asked if o.method == BASELINE and not o.again]
    bases = {(o.temperature, o.batch): every[o.name] for o in plain}
    for one in (one for one in asked if one.name not in failed):
        base, mine = bases.get((one.temperature, one.batch)), every[one.name]
        if not one.again:
            beside = None if base is mine else base
            right = right_of(judged, mine, beside, questions)
            rows.append(_row(one, mine, beside, groups, config.seed) | {"right": right})
        elif base and (both := [i for i in mine if i in base]):
            speedup = _figures(mine, base, both, config.seed)["speedup"]
            at = {"temperature": one.temperature, "batch": one.batch}
            again.append(at | {"questions": len(both), "speedup": speedup})
    _compare(rows, {row["name"]: [every[row["name"]][i] for i in questions] for row in rows})
    few = {"overall": questions, **groups}
    return {
        **{name: head[name] for name in ("options", "environment", "machine", "left_out")},
        "timed": timed,
        "questions": len(questions),
        "few_questions": [name for name, chosen in few.items() if len(chosen) < FEW],
        "again": again,
        "rows": rows,
        "failed": failed,
        "forwards": [time for entry in ledger.of("forwards") for time in entry["times"]],
    }


def _row(
    one: Contestant,
    mine: Completions,
    base: Completions | None,
    groups: Mapping[str, Sequence[int | str]],
    seed: int,
) -> Row:
    """A contestant's row, but for its comparison with others."""
    questions = [i for chosen in groups.values() for i in chosen]
    ends = [end for i in questions for end in mine[i]["ended"]]
    same = None
    if one.temperature == 0 and base is not None:
        told: Literal["token_ids", "turns"] = "turns"
        if any(mine[questions[0]]["token_ids"]):
            told = "token_ids"
        turns = [(mine[i][told], base[i][told]) for i in questions]
        same = sum(ours == theirs for both in turns for ours, theirs in zip(*both, strict=True))
    return asdict(one) | {
        "lossless": one.lossless,
        "overall": _figures(mine, base, questions, seed),
        "categories": {n: _figures(mine, base, some, seed) for n, some in groups.items()},
        "same": same,
        "turns": len(ends),
        "ended": {end: ends.count(end) for end in ("model", "max_new_tokens", "context")},
    }


def _compare(rows: Sequence[Row], mine: Mapping[str, Sequence[Completion]]) -> None:
    """Fill in each row's tokens/s over those of others. mine: completions by the row's name."""
    draws = resample(len(next(iter(mine.values()))), RESAMPLES, seed=0)
    speeds = {name: speed_of(completions, draws) for name, completions in mine.items()}
    kinds = ("method", "drafter", "tree", "peer")
    for row in rows:
        here = [other for other in rows if other["temperature"] == row["temperature"]]
        level = [other for other in here if other["batch"] == row["batch"]]
        pairs = [other for other in level if other["drafter"] and other["lossless"]]
        best = sorted(pairs, key=lambda other: -speeds[other["name"]][0])
        found = {
            "by_generate": [other for other in level if other["method"] == GENERATE],
            "of_fastest": best if row["drafter"] else [],
            "over_smallest": [o for o in here if all(o[kind] == row[kind] for kind in kinds)],
        }
        for name, others in found.items():
            ratio = others and interval(speeds[row["name"]] / speeds[others[0]["name"]])
            row[name] = ratio if others and others[0] is not row else None


def _figures(
    mine: Completions, base: Completions | None, chosen: Sequence[int | str], seed: int
) -> Figures:
    """`figures` of some questions."""
    beside = None if base is None else [base[i] for i in chosen]
    return figures([mine[i] for i in chosen], beside, resample(len(chosen), RESAMPLES, seed))
