"""From the ledger to the figures in OUT/report.json: a row for each contestant, and what they share.

options, environment, left_out: of the ledger's head. timed: False where several processes
shared the machine. questions: their number. few_questions: categories with too few of them for their
intervals. failed: why a peer has no figures, by its name. costs: of cycles, by context. again:
contestants that were asked a second time (A/A), with the `figures` of that over the first.

A row has the fields of its `Contestant`, and:

    lossless       whether the completions have the target's distribution
    overall        `figures` of all questions
    categories     `figures` by category, by task for Spec-Bench
    by_generate    tokens/s over those of `model.generate`
    of_fastest     tokens/s over those of the fastest lossless pair; None for that one
    same           turns of temperature 0 with the baseline's tokens, of a server with its text
    turns, ended   the number of turns; by what ended them
    right          `right_figures`; None where no completion was checked
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

import numpy as np

from treespec.errors import InputError
from treespec.eval.config import EvalConfig
from treespec.eval.contestants import BASELINE, GENERATE, Contestant
from treespec.eval.intervals import FEW, Array, interval, paired_difference, resample, share_of
from treespec.eval.ledger import Completion, Ledger

RESAMPLES = 1000
STAGES = {  # of a cycle, in the order of tables, and their names there
    "head": "draft model",
    "rest_of_drafting": "rest of drafting",
    "target": "target",
    "verify": "verify",
    "commit": "commit",
    "rest": "rest",
}

Id = int | str  # of a question
Completions = Mapping[
    Id, Any
]  # a contestant's, each with `right`, the verdict of its check or None
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
    asked = [Contestant(**fields) for fields in head["contestants"]]
    checked = {(e["contestant"], e["question_id"]): e["right"] for e in ledger.of("checked")}
    every: dict[str, dict[Id, Row]] = {one.name: {} for one in asked}
    for entry in ledger.of("completion"):
        name, i = entry["contestant"], entry["question_id"]
        if sum(entry["new_tokens"]):
            every[name][i] = entry | {"right": checked.get((name, i))}
            if not timed:
                every[name][i]["wall"] = [math.nan]

    # 2. The questions that count, and their groups.
    failed = {entry["contestant"]: entry["why"] for entry in ledger.of("failed")}
    first, *others = (every[o.name] for o in asked if not o.again and o.name not in failed)
    questions = [i for i in first if all(i in other for other in others)]
    if not questions:
        raise InputError(
            f"{config.out}: no question is completed; is every one longer than the target's context?"
        )
    groups: dict[str, list[Id]] = {"overall": questions}
    for i in questions:
        groups.setdefault(first[i]["group"], []).append(i)
    failed = {name: why for name, why in failed.items() if not every[name].keys() >= {*questions}}

    # 3. A row for each contestant, and one for the baseline's second time.
    plain = [o for o in asked if o.method == BASELINE and not o.again]
    bases = {(o.temperature, o.batch): every[o.name] for o in plain}
    rows, again = [], []
    for one in (one for one in asked if one.name not in failed):
        base, mine = bases.get((one.temperature, one.batch)), every[one.name]
        if not one.again:
            rows.append(row_of(one, mine, None if base is mine else base, groups, config.seed))
        elif base and (both := [i for i in mine if i in base]):
            again.append(asdict(one) | figures_of(mine, base, both, config.seed))
    compare(rows, {row["name"]: [every[row["name"]][i] for i in questions] for row in rows})
    return {
        **{name: head[name] for name in ("options", "environment", "left_out")},
        "timed": timed,
        "questions": len(questions),
        "few_questions": [name for name, chosen in groups.items() if len(chosen) < FEW],
        "again": again,
        "rows": rows,
        "failed": failed,
        "costs": ledger.of("cost"),
    }


def row_of(
    one: Contestant,
    mine: Completions,
    base: Completions | None,
    groups: Mapping[str, Sequence[Id]],
    seed: int,
) -> Row:
    """A contestant's row, but for its comparison with others. base: the baseline's completions."""
    # 1. Figures by group, and what ended the turns.
    by_group = {name: figures_of(mine, base, chosen, seed) for name, chosen in groups.items()}
    pairs = [(mine[i], (base or mine)[i]) for i in groups["overall"]]
    ends = [end for ours, _ in pairs for end in ours["ended"]]

    # 2. Beside the baseline: the same turns, and right answers.
    same = None
    if one.temperature == 0 and base is not None:
        said = "token_ids" if any(pairs[0][0]["token_ids"]) else "turns"  # a server tells no ids
        same = sum(x == y for a, b in pairs for x, y in zip(a[said], b[said], strict=True))
    verdicts = [(ours["right"], theirs["right"]) for ours, theirs in pairs]
    right = [both for both in verdicts if None not in both]
    theirs = None if base is None else [verdict for _, verdict in right]
    return asdict(one) | {
        "lossless": one.lossless,
        "overall": by_group.pop("overall"),
        "categories": by_group,
        "same": same,
        "turns": len(ends),
        "ended": {end: ends.count(end) for end in ("model", "max_new_tokens", "context")},
        "right": right_figures([verdict for verdict, _ in right], theirs) if right else None,
    }


def compare(rows: Sequence[Row], mine: Mapping[str, Sequence[Any]]) -> None:
    """Fill in each row's tokens/s over those of others. mine: completions by the row's name."""
    draws = resample(len(next(iter(mine.values()))), RESAMPLES, seed=0)
    speeds = {name: speed_of(totals(completions, draws)) for name, completions in mine.items()}
    for row in rows:
        at = row["temperature"], row["batch"]
        here = [other for other in rows if (other["temperature"], other["batch"]) == at]
        generate = [other for other in here if other["method"] == GENERATE]
        pairs = [other for other in here if other["drafter"] and other["lossless"]]
        fastest = sorted(pairs, key=lambda other: -speeds[other["name"]][0])
        found = {"by_generate": generate, "of_fastest": fastest if row["drafter"] else []}
        for name, others in found.items():
            row[name] = None
            if others and others[0] is not row:
                row[name] = interval(speeds[row["name"]] / speeds[others[0]["name"]])


def figures_of(mine: Completions, base: Completions | None, chosen: Sequence[Id], seed: int) -> Row:
    """`figures` of some questions."""
    beside = None if base is None else [base[i] for i in chosen]
    return figures([mine[i] for i in chosen], beside, resample(len(chosen), RESAMPLES, seed))


def figures(mine: Sequence[Completion], base: Sequence[Completion] | None, draws: Array) -> Row:
    """What one contestant's completions of Q questions come to.

    The bootstrap resamples whole questions, because the tokens and cycles of one completion are not
    independent. A contestant and its baseline get the same resamples. Every figure is a ratio of
    totals over questions; a resample weights the totals of each question by how often it was drawn.

    base: the baseline's completions of the same questions, in the same order. draws: [1 + R, Q], by
    `resample`. Returns `Figure`s: acceptance_length τ, tokens per cycle; acceptance_rate_by_depth,
    the share of the cycles with an accepted token at the depth above that accepted one at this depth;
    tokens_per_second by the clock; speedup, tokens/s over the baseline's; decoding_speedup, without
    prefill; bound, that, if a cycle cost its forwards alone. And numbers: questions, tokens, cycles,
    seconds; nodes, the mean size of the tree of one forward, with its root; undrafted, the share of
    the cycles without a draft token; prefill_seconds; cycle_ms by stage; first_token, mean seconds to
    the first token: of treespec the prefill and a cycle, of a server as its client sees it, of
    transformers None.
    """
    own = totals(mine, draws)
    with np.errstate(divide="ignore", invalid="ignore"):
        # 1. Ratios of totals in each resample.
        ratios = {"acceptance_length": own["new_tokens"] / own["cycles"]}
        ratios["tokens_per_second"] = speed_of(own)
        if base is not None:
            plain = totals(base, draws)
            one_token = (plain["wall"] - plain["prefill"]) / plain["new_tokens"]
            forwards = (own["target"] + own["head"]) / own["new_tokens"]
            ratios["speedup"] = speed_of(own) / speed_of(plain)
            ratios["decoding_speedup"] = (
                own["new_tokens"] / (own["wall"] - own["prefill"]) * one_token
            )
            ratios["bound"] = plain["target"] / plain["cycles"] / forwards

        # 2. Rates by depth. A depth that no cycle reached has none.
        by_depth = zip_longest(*(one["accepted"] for one in mine), fillvalue=0)
        accepted = [draws @ np.array(counts, dtype=float) for counts in by_depth]
        rates = [b / a for a, b in zip([own["cycles"], *accepted], accepted, strict=False)]

        # 3. Numbers.
        value = {name: float(samples[0]) for name, samples in own.items()}
        cycles, turns = np.float64(value["cycles"]), sum(len(one["turns"]) for one in mine)
        cycle = {stage: float(1000 * value[stage] / cycles) for stage in STAGES}
        waits = sum(one["seconds"].get("first", 0.0) for one in mine) / turns
        if cycles:
            waits = value["prefill"] / turns + sum(cycle.values()) / 1000
        return {
            **dict.fromkeys(("speedup", "decoding_speedup", "bound")),
            **{name: interval(samples) for name, samples in ratios.items()},
            "acceptance_rate_by_depth": [interval(rate) for rate in rates],
            "questions": len(mine),
            "tokens": int(value["new_tokens"]),
            "cycles": int(cycles),
            "seconds": value["wall"],
            "nodes": float(1 + value["drafted"] / cycles),
            "undrafted": float(value["undrafted"] / cycles),
            "prefill_seconds": value["prefill"],
            "cycle_ms": cycle,
            "first_token": waits or None,
        }


def totals(completions: Sequence[Completion], draws: Array) -> dict[str, Array]:
    """[1 + R] totals of `counted` in each resample. draws: [1 + R, Q]."""
    rows = [counted(one) for one in completions]
    return {name: draws @ np.array([row[name] for row in rows], dtype=float) for name in rows[0]}


def counted(one: Completion) -> dict[str, float]:
    """Tokens, cycles and seconds of one completion, in all and by stage.

    Seconds of a generation that waited for its device at the ends of every stage go before others.
    Without them (`--contexts`) the stages and the prefill add up to `wall`.
    """
    wall, seconds = sum(one["wall"]), one["seconds"]
    waited = [name for name in seconds if name.startswith("waited ")]
    spent = {name.removeprefix("waited "): seconds[name] for name in waited} or seconds
    stages = ("prefill", "head", "target", "verify", "commit")
    by_stage = {stage: spent.get(stage, 0.0) for stage in stages}
    by_stage["rest_of_drafting"] = spent.get("draft", 0.0) - by_stage["head"]
    return by_stage | {
        "rest": (spent["total"] if waited else wall) - sum(by_stage.values()),
        "wall": wall,
        "new_tokens": sum(one["new_tokens"]),
        "cycles": sum(one["cycles"]),
        "drafted": sum(one["drafted"]),
        "undrafted": one["undrafted"],
    }


def speed_of(total: Mapping[str, Array]) -> Array:
    """[1 + R] tokens/s."""
    return total["new_tokens"] / total["wall"]


def right_figures(mine: Sequence[bool], base: Sequence[bool] | None) -> Row:
    """How often one contestant is right. base: the baseline's verdicts on the same questions, in order.

    answers: checked ones. right: the right ones among them. share: right by answers. difference: the
    share less the baseline's. same: questions on which the baseline's verdict is the same.
    """
    return {
        "answers": len(mine),
        "right": sum(mine),
        "share": share_of(sum(mine), len(mine)),
        "difference": None if base is None else paired_difference(mine, base),
        "same": None if base is None else sum(map(bool.__eq__, mine, base)),
    }
