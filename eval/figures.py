"""From the ledger to the figures in OUT/report.json: a row for each contestant, and what they share.

options, environment, left_out: of the ledger's head. timed: False where several processes
shared the machine. questions: their number. few_questions: categories with too few of them for their
intervals. failed: why a peer has no figures, by its name. again: contestants that were asked a
second time (A/A), with the `figures` of that over the first.

A row has the fields of its `Contestant`, and:

    lossless       whether the completions have the target's distribution
    overall        `figures` of all questions
    categories     `figures` by category, by task for Spec-Bench
    by_generate    tokens/s over those of `model.generate`
    same           turns of temperature 0 with the baseline's tokens, of a server with its text
    turns, ended   the number of turns; by what ended them
    right          None where no completion can be right. answers: those that can. right: those that
                   are. share: right by answers. same: as right as the baseline's
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

import numpy as np

from treespec.errors import InputError
from treespec.eval.config import EvalConfig
from treespec.eval.intervals import FEW, Array, interval, leave_one_out, share_of
from treespec.eval.ledger import Completion, Ledger
from treespec.eval.systems import BASELINE, GENERATE, Contestant

STAGES = ("draft model", "rest of drafting", "target", "verify", "commit", "rest")  # of a cycle

Id = int | str  # of a question
Completions = Mapping[Id, Completion]  # a contestant's
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
    config = EvalConfig(**head["options"])
    timed = head["processes"] == 1
    asked = [Contestant(**fields) for fields in head["contestants"]]
    every: dict[str, dict[Id, Completion]] = {one.name: {} for one in asked}
    for entry in ledger.of("completion"):
        if sum(entry["new_tokens"]):
            counts = entry if timed else entry | {"wall": [math.nan]}
            every[entry["contestant"]][entry["question_id"]] = counts

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
    plain = {(o.method, o.temperature, o.batch): every[o.name] for o in asked if not o.again}
    rows = []
    again = []
    for one in (one for one in asked if one.name not in failed):
        mine = every[one.name]
        at = (one.temperature, one.batch)
        base, generate = (
            other if (other := plain.get((method, *at))) is not mine else None
            for method in (BASELINE, GENERATE)
        )
        if not one.again:
            rows.append(asdict(one) | row_of(one, mine, base, groups))
            by_generate = figures_of(mine, generate, questions)["speedup"]
            rows[-1] |= {"lossless": one.lossless, "by_generate": by_generate}
        elif base and (both := [i for i in mine if i in base]):
            again.append(asdict(one) | figures_of(mine, base, both))
    return {name: head[name] for name in ("options", "environment", "left_out")} | {
        "timed": timed,
        "questions": len(questions),
        "few_questions": [name for name, chosen in groups.items() if len(chosen) < FEW],
        "again": again,
        "rows": rows,
        "failed": failed,
    }


def row_of(
    one: Contestant,
    mine: Completions,
    base: Completions | None,
    groups: Mapping[str, Sequence[Id]],
) -> Row:
    """The figures of a contestant, by itself and beside the baseline's completions `base`."""
    # 1. Figures by group, and what ended the turns.
    by_group = {name: figures_of(mine, base, chosen) for name, chosen in groups.items()}
    pairs = [(mine[i], (base or mine)[i]) for i in groups["overall"]]
    ends = [end for ours, _ in pairs for end in ours["ended"]]

    # 2. Beside the baseline: the same turns, and right answers.
    same = None
    if one.temperature == 0 and base is not None:
        said = "token_ids" if any(pairs[0][0]["token_ids"]) else "turns"  # a server tells no ids
        same = sum(x == y for a, b in pairs for x, y in zip(a[said], b[said], strict=True))
    verdicts = [(a["right"], b["right"]) for a, b in pairs if a["right"] is not None]
    right = None
    if verdicts:
        number = sum(ours for ours, _ in verdicts)
        of = len(verdicts)
        alike = base and sum(ours == theirs for ours, theirs in verdicts)
        right = {"answers": of, "right": number, "share": share_of(number, of), "same": alike}
    return {
        "overall": by_group.pop("overall"),
        "categories": by_group,
        "same": same,
        "turns": len(ends),
        "ended": {end: ends.count(end) for end in ("model", "max_new_tokens", "context")},
        "right": right,
    }


def figures_of(mine: Completions, base: Completions | None, chosen: Sequence[Id]) -> Row:
    """`figures` of some questions."""
    beside = None if base is None else [base[i] for i in chosen]
    return figures([mine[i] for i in chosen], beside)


def figures(mine: Sequence[Completion], base: Sequence[Completion] | None) -> Row:
    """What one contestant's completions of Q questions come to.

    The jackknife leaves out whole questions, because the tokens and cycles of one completion are not
    independent, and of a contestant and its baseline the same. Every figure is a ratio of totals over
    questions.

    base: the baseline's completions of the same questions, in the same order.

    Returns `Figure`s: acceptance_length τ, tokens per cycle; acceptance_rate_by_depth, the share of the
    cycles with an accepted token at the depth above that accepted one at this depth; tokens_per_second by
    the clock; speedup, tokens/s over the baseline's; decoding_speedup, without prefill; bound, that, if a
    cycle cost its forwards alone. And numbers: questions, tokens, cycles, seconds; nodes, the mean size of
    the tree of one forward, with its root; undrafted, the share of the cycles without a draft token;
    prefill_seconds; cycle_ms by stage; first_token, mean seconds to the first token: of treespec the prefill
    and a cycle, of a server as its client sees it, of transformers None.
    """
    weights = leave_one_out(len(mine))
    own = totals(mine, weights)
    with np.errstate(divide="ignore", invalid="ignore"):
        # 1. Ratios of totals, of all questions and without each.
        tokens = own["new_tokens"]
        wall = own["wall"]
        cycles = own["cycles"]
        ratios = {"acceptance_length": tokens / cycles, "tokens_per_second": tokens / wall}
        if base is not None:
            plain = totals(base, weights)
            one_token = 1 / plain["new_tokens"]  # its share of plain decoding
            ratios["speedup"] = tokens / wall * plain["wall"] * one_token
            decoding = (plain["wall"] - plain["prefill"]) * one_token
            ratios["decoding_speedup"] = tokens / (wall - own["prefill"]) * decoding
            forward = plain["target"] / plain["cycles"]
            ratios["bound"] = tokens / (own["target"] + own["draft model"]) * forward

        # 2. Rates by depth. A depth that no cycle reached has none.
        by_depth = zip_longest(*(one["accepted"] for one in mine), fillvalue=0)
        accepted = [weights @ np.array(counts, dtype=float) for counts in by_depth]
        rates = [b / a for a, b in zip([cycles, *accepted], accepted, strict=False)]

        # 3. Numbers; a server or transformers tells no cycles.
        value = {name: samples[0] for name, samples in own.items()}
        turns = sum(len(one["turns"]) for one in mine)
        forwards = value["cycles"]
        cycle_ms = {stage: 1000 * value[stage] / forwards for stage in STAGES}
        first_token = sum(one["seconds"].get("first", 0.0) for one in mine) / turns
        if forwards:
            first_token = value["prefill"] / turns + sum(cycle_ms.values()) / 1000
        return {
            **dict.fromkeys(("speedup", "decoding_speedup", "bound")),
            **{name: interval(samples) for name, samples in ratios.items()},
            "acceptance_rate_by_depth": [interval(rate, most=1.0) for rate in rates],
            "questions": len(mine),
            "tokens": int(value["new_tokens"]),
            "cycles": int(forwards),
            "seconds": value["wall"],
            "nodes": 1 + value["drafted"] / forwards,
            "undrafted": value["undrafted"] / forwards,
            "prefill_seconds": value["prefill"],
            "cycle_ms": cycle_ms,
            "first_token": first_token or None,
        }


def totals(completions: Sequence[Completion], weights: Array) -> dict[str, Array]:
    """[1 + Q] totals of `counted` by rows of weights [1 + Q, Q]."""
    rows = [counted(one) for one in completions]
    return {name: weights @ np.array([row[name] for row in rows], dtype=float) for name in rows[0]}


def counted(one: Completion) -> dict[str, float]:
    """Tokens, cycles and seconds of one completion, in all and by stage.

    The stages and the prefill add up to `wall`.
    """
    seconds = one["seconds"]
    spent = {stage: seconds.get(stage, 0.0) for stage in ("prefill", "target", "verify", "commit")}
    spent["draft model"] = seconds.get("head", 0.0)
    spent["rest of drafting"] = seconds.get("draft", 0.0) - spent["draft model"]
    sums = {name: sum(one[name]) for name in ("wall", "new_tokens", "cycles", "drafted")}
    rest = sums["wall"] - sum(spent.values())
    return spent | sums | {"rest": rest, "undrafted": one["undrafted"]}
