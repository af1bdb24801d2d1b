"""From completions to figures: acceptance, speed, a cycle's time, with bootstrap intervals.

The bootstrap resamples whole questions, because the tokens and cycles of one completion are not
independent. A contestant and its baseline get the same resamples. Every figure but `by_question` is
a ratio of totals over questions; a resample weights the totals of each question by how often it was
drawn. Sampled completions differ in length: a ratio of totals weights them by their tokens. A median
counts each question alike, and feels no question during which the machine was busy.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Literal, TypedDict, cast

import numpy as np

from treespec.eval.bootstrap import Array, Figure, interval, medians
from treespec.eval.common import STAGES, Stage
from treespec.eval.ledger import Completion

TOTALS = ("new_tokens", "cycles", "wall")


class Figures(TypedDict):
    """What one contestant's completions of some questions come to.

    A `Figure` is {value, low, high}, with a 95 % interval. seconds: by the clock. acceptance_length:
    τ, tokens per cycle. acceptance_rate_by_depth: α, the share of the cycles with an accepted token
    at the depth above that accepted one at this depth. nodes: mean size of the tree of one forward,
    with its root. undrafted: the share of the cycles without a draft token. speedup: tokens/s over
    the baseline's; by_question: the median of the questions' own. decoding_speedup: without prefill;
    bound: that, if a cycle cost its forwards alone. cycle_ms, cycle_share: a cycle's time by stage.
    overhead: the share outside the forwards of target and draft model. first_token: mean seconds to
    the first token; of treespec the prefill and a cycle, of a server as its client sees it, of
    transformers None.
    """

    questions: int
    tokens: int
    cycles: int
    seconds: float
    acceptance_length: Figure
    acceptance_rate_by_depth: list[Figure]
    nodes: float
    undrafted: float
    drafted_by_depth: list[int]
    accepted_by_depth: list[int]
    tokens_per_second: Figure
    speedup: Figure | None
    by_question: Figure | None
    decoding_speedup: Figure | None
    bound: Figure | None
    prefill_seconds: float
    cycle_ms: dict[Stage, float]
    cycle_share: dict[Stage, float]
    overhead: float
    first_token: float | None


def figures(mine: Sequence[Completion], base: Sequence[Completion] | None, draws: Array) -> Figures:
    """What one contestant's completions of Q questions come to.

    base: the baseline's of the same questions, in the same order. draws: [1 + R, Q], by `resample`.
    """
    # 1. Totals by question, [Q] each, and by depth, [Q, D].
    tokens, cycles, wall = (_totals(mine, name) for name in TOTALS)
    drafted, accepted = (_by_depth(mine, name) for name in ("drafted", "accepted"))
    reached = np.column_stack([cycles, accepted])  # [Q, 1 + D], cycles that reached each depth
    stages = _stages(mine)
    spent = {stage: float(stages[stage].sum()) for stage in STAGES}
    forwards, decoding = stages["target"] + stages["head"], sum(spent.values())

    def total(values: Array) -> Array:
        return draws @ values  # [1 + R, ...]

    # 2. Ratios of totals in each resample. A depth that no cycle reached has no rate.
    compared: dict[str, Figure | None] = dict.fromkeys(
        ("speedup", "by_question", "decoding_speedup", "bound")
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        if base is not None:
            other, beside = {n: _totals(base, n) for n in TOTALS}, _stages(base)
            plain_speed = other["new_tokens"] / other["wall"]
            plain = total(other["wall"] - beside["prefill"]) / total(other["new_tokens"])
            one = total(beside["target"]) / total(other["cycles"])  # seconds of a forward
            compared = {
                "speedup": interval(speed_of(mine, draws) / speed_of(base, draws)),
                "by_question": interval(medians(tokens / wall / plain_speed, draws)),
                "decoding_speedup": interval(
                    total(tokens) / total(wall - stages["prefill"]) * plain
                ),
                "bound": interval(total(tokens) / total(forwards) * one),
            }
        rates = total(accepted) / total(reached[:, :-1])
        length = total(tokens) / total(cycles)
        steps = np.float64(cycles.sum())
        prefill = float(stages["prefill"].sum())
        turns = sum(len(completion["turns"]) for completion in mine)
        waits = sum(completion["seconds"].get("first", 0.0) for completion in mine)
        if steps:
            waits = prefill + decoding * turns / float(steps)
        return cast(
            Figures,
            compared
            | {
                "questions": len(mine),
                "tokens": int(tokens.sum()),
                "cycles": int(steps),
                "seconds": float(wall.sum()),
                "acceptance_length": interval(length),
                "acceptance_rate_by_depth": [interval(rate) for rate in rates.T],
                "nodes": float(1 + drafted.sum() / steps),
                "undrafted": float(sum(one["undrafted"] for one in mine) / steps),
                "drafted_by_depth": drafted.sum(0).astype(int).tolist(),
                "accepted_by_depth": accepted.sum(0).astype(int).tolist(),
                "tokens_per_second": interval(speed_of(mine, draws)),
                "prefill_seconds": prefill,
                "cycle_ms": {stage: float(1000 * spent[stage] / steps) for stage in STAGES},
                "cycle_share": {stage: spent[stage] / decoding for stage in STAGES},
                "overhead": float(1 - forwards.sum() / decoding),
                "first_token": waits / turns if waits else None,
            },
        )


def speed_of(completions: Sequence[Completion], draws: Array) -> Array:
    """[1 + R] tokens/s in each resample. draws: [1 + R, Q]."""
    return (draws @ _totals(completions, "new_tokens")) / (draws @ _totals(completions, "wall"))


def _totals(completions: Sequence[Completion], name: str) -> Array:
    """[Q] sums over the turns."""
    return np.array([sum(cast(Any, one)[name]) for one in completions], dtype=float)


def _stages(completions: Sequence[Completion]) -> dict[str, Array]:
    """[Q] seconds of prefill, and of all cycles by stage. Without --contexts they add up to `wall`.

    Times of a generation that waited for its device at the ends of every stage go before others.
    """

    def spent(name: str) -> Array:
        own = (one["seconds"] for one in completions)
        return np.array([of.get(f"waited {name}", of.get(name, 0.0)) for of in own])

    waited = np.array(["waited total" in one["seconds"] for one in completions])
    whole = np.where(waited, spent("total"), _totals(completions, "wall"))
    seconds = {name: spent(name) for name in ("prefill", "head", "target", "verify", "commit")}
    seconds["rest_of_drafting"] = spent("draft") - seconds["head"]
    return seconds | {"rest": whole - sum(seconds.values())}


def _by_depth(completions: Sequence[Completion], name: Literal["drafted", "accepted"]) -> Array:
    """[Q, D] counts by depth, 0 where a completion has fewer."""
    by_depth = zip_longest(*(one[name] for one in completions), fillvalue=0)
    return np.array(list(by_depth), dtype=float).reshape(-1, len(completions)).T
