"""Figures of timed answers: medians over questions, and totals over totals ("overall").

Sampled answers differ in length. A median counts an answer of two tokens like any other; a ratio
of totals weights answers by their tokens. A median is robust to a question during which the machine
was busy; a ratio of totals is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
from scipy.stats import bootstrap

from treespec.decoding.stats import Stats
from treespec.eval.bench.result import CycleFigures, Overall, Speed, SpeedFigures
from treespec.eval.bootstrap import Array, Figure, interval, resample
from treespec.eval.common import STAGES, Stage

RESAMPLES = 1000
Number = TypeVar("Number", float, Array)


@dataclass(frozen=True)
class Timed:
    """One answer. tokens: new ones. seconds: from prompt to last token.

    stats: counts and times of the same generation; None for a peer. stages: of a generation that
    waited for the device at both ends of every stage; on a CPU `stats` itself.
    """

    tokens: list[int]
    seconds: float
    stats: Stats | None = None
    stages: Stats | None = None

    @property
    def measured(self) -> tuple[Stats, Stats]:
        """(stats, stages) of an answer by treespec, which always has both."""
        assert self.stats
        assert self.stages
        return self.stats, self.stages


def median(values: Sequence[float], seed: int) -> Figure:
    """The median and its 95 % bootstrap interval."""
    value = float(np.median(values))
    if len(values) < 2 or np.ptp(values) == 0:
        return {"value": value, "low": None, "high": None}
    limits = bootstrap(
        (np.asarray(values),),
        np.median,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return {"value": value, "low": float(limits.low), "high": float(limits.high)}


def bound(tau: Number, one: Number, tree: Number, draft: Number) -> Number:
    """The speedup if a cycle cost its forwards alone: τ · T(1) / (T(N) + T_draft).

    tau: tokens per cycle. one, tree: seconds of the target's forward over one token and over the
    tree. draft: seconds of all the draft model's forwards in a cycle.
    """
    return tau * one / (tree + draft)


def cycle_ms(stats: Stats) -> dict[Stage, float]:
    """Milliseconds of each stage per cycle; the target's prefill is left out."""
    spent = stats.seconds
    seconds: dict[Stage, float] = {
        "head": spent["head"],
        "rest_of_drafting": spent["draft"] - spent["head"],
        "target": spent["target"],
        "verify": spent["verify"],
        "commit": spent["commit"],
    }
    seconds["rest"] = _decoding_seconds(stats) - sum(seconds.values())
    return {stage: 1000 * seconds[stage] / stats.cycles for stage in STAGES}


def cycle_figures(answers: Sequence[Timed], one_token: Sequence[Timed], seed: int) -> CycleFigures:
    """A cycle's times, and the speedup over one-token decoding beside its bound.

    one_token: its answers to the same questions, in the same order.
    """
    # 1. Medians over questions of each question's own figures.
    pairs = zip(answers, one_token, strict=True)
    rows = [_of_question(answer, baseline) for answer, baseline in pairs]
    medians = {name: median([row[name] for row in rows], seed) for name in rows[0]}

    # 2. Totals over totals, in every resample of the questions.
    weights = resample(len(answers), RESAMPLES, seed)
    ours, plain = _totals(weights, answers), _totals(weights, one_token)
    tau = ours["tokens"] / ours["cycles"]
    speedup = (ours["tokens"] / ours["decoding"]) / (plain["tokens"] / plain["decoding"])
    one = plain["target"] / plain["cycles"]
    tree, draft = ours["target"] / ours["cycles"], ours["head"] / ours["cycles"]
    limit = bound(tau, one, tree, draft)
    overall: Overall = {
        "speedup": interval(speedup),
        "bound": interval(limit),
        "speedup_by_bound": interval(speedup / limit),
    }
    figures = {**medians, "overall": overall, "acceptance_length": interval(tau)}
    return cast(CycleFigures, figures)


def _of_question(answer: Timed, one_token: Timed) -> dict[str, float]:
    """The figures of one question, by their names in `CycleFigures`."""
    stats, stages = answer.measured
    plain_stats, plain_stages = one_token.measured
    ms, plain_ms = cycle_ms(stages), cycle_ms(plain_stages)
    speed = stats.new_tokens / _decoding_seconds(stats)
    speedup = speed / (plain_stats.new_tokens / _decoding_seconds(plain_stats))
    limit = bound(stats.acceptance_length, plain_ms["target"], ms["target"], ms["head"])
    figures = {
        "cycle": sum(ms.values()),
        "overhead": stages.overhead,
        "tokens_per_second": speed,
        "speedup": speedup,
        "bound": limit,
        "speedup_by_bound": speedup / limit,
    }
    return {str(stage): spent for stage, spent in ms.items()} | figures


def _totals(weights: Array, answers: Sequence[Timed]) -> dict[str, Array]:
    """[1 + R] totals of every resample: tokens, cycles, seconds of decoding and of the forwards.

    weights: [1 + R, Q].
    """
    rows = []
    for answer in answers:
        stats, stages = answer.measured
        forwards = stages.seconds["target"], stages.seconds["head"]
        rows.append((stats.new_tokens, stats.cycles, _decoding_seconds(stats), *forwards))
    names = ("tokens", "cycles", "decoding", "target", "head")
    return dict(zip(names, (weights @ np.array(rows, dtype=float)).T, strict=True))


def _decoding_seconds(stats: Stats) -> float:
    """Seconds without the target's prefill."""
    return stats.seconds["total"] - stats.seconds["prefill"]


def speed_figures(
    answers: Sequence[Timed],
    generate: Sequence[Timed] | None,
    one_token: Sequence[Timed],
    seed: int,
) -> SpeedFigures:
    """Tokens/s from prompt to last token, and ratios to `model.generate` and one-token decoding.

    generate, one_token: their answers to the same questions; generate is None where it raised.
    """
    # 1. Tokens/s by question and of the totals.
    weights = resample(len(answers), RESAMPLES, seed)
    speeds, total = _speeds(answers), _total_speed(weights, answers)

    def median_over(others: Sequence[Timed] | None) -> Figure | None:
        return median(list(speeds / _speeds(others)), seed) if others else None

    def total_over(others: Sequence[Timed] | None) -> Figure | None:
        return interval(total / _total_speed(weights, others)) if others else None

    # 2. The same, and the ratios.
    overall: Speed = {
        "tokens_per_second": interval(total),
        "over_generate": total_over(generate),
        "over_one_token": total_over(one_token),
    }
    return {
        "tokens_per_second": median(list(speeds), seed),
        "over_generate": median_over(generate),
        "over_one_token": median_over(one_token),
        "overall": overall,
    }


def identical(answers: Sequence[Timed], others: Sequence[Timed]) -> int:
    """The number of questions to which both answers have the same tokens."""
    return sum(a.tokens == b.tokens for a, b in zip(answers, others, strict=True))


def _speeds(answers: Sequence[Timed]) -> Array:
    """[Q] tokens/s of each answer."""
    return np.array([len(answer.tokens) / answer.seconds for answer in answers])


def _total_speed(weights: Array, answers: Sequence[Timed]) -> Array:
    """[1 + R] tokens/s of every resample: total tokens over total seconds. weights: [1 + R, Q]."""
    rows = [(len(answer.tokens), answer.seconds) for answer in answers]
    tokens, seconds = np.array(rows, dtype=float).T
    return (weights @ tokens) / (weights @ seconds)
