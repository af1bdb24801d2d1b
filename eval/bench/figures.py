"""From timed answers to figures, in two ways: medians over questions of their own, and overall, totals over totals.

Sampled answers differ in length, and one that ends after two tokens counts in a median as much as any other; overall
it counts by its tokens. A median forgets a question in which the machine was busy with something else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from scipy.stats import bootstrap

from treespec.eval.bootstrap import interval, resample
from treespec.eval.common import STAGES
from treespec.stats import Stats

RESAMPLES = 1000
Figure = dict[str, float | None]
Number = TypeVar("Number", float, np.ndarray)


@dataclass(frozen=True)
class Timed:
    """One answer: its new tokens, the seconds from prompt to last token, and what treespec's own count besides.

    stats: of the same generation. stages: of one whose stages ended with the device's work; on a CPU the same.
    """

    tokens: list[int]
    seconds: float
    stats: Stats | None = None
    stages: Stats | None = None


def median(values: Sequence[float], seed: int) -> Figure:
    """The median and its 95 % bootstrap interval, None where nothing varies."""
    value = float(np.median(values))
    if len(values) < 2 or np.ptp(values) == 0:
        return {"value": value, "low": None, "high": None}
    drawn = bootstrap(
        (np.asarray(values),),
        np.median,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return {"value": value, "low": float(drawn.low), "high": float(drawn.high)}


def bound(tau: Number, one: Number, tree: Number, draft: Number) -> Number:
    """The speedup if a cycle were its forwards alone: τ · T(1) / (T(N) + T_draft).

    tau: tokens a cycle. one, tree, draft: seconds of the target's forward over one token and over the tree, and of
    all the draft model's forwards in a cycle.
    """
    return tau * one / (tree + draft)


def cycle_ms(stats: Stats) -> dict[str, float]:
    """Where a cycle's time goes, in ms by stage; prefill of the target is no part of it."""
    spent = stats.seconds
    found = {"head": spent["head"], "rest_of_drafting": spent["draft"] - spent["head"]}
    found |= {stage: spent[stage] for stage in ("target", "verify", "commit")}
    found["rest"] = spent["total"] - spent["prefill"] - sum(found.values())
    return {stage: 1000 * found[stage] / stats.cycles for stage in STAGES}


def decoding_speed(stats: Stats) -> float:
    """Tokens/s without the prefill."""
    return stats.new_tokens / (stats.seconds["total"] - stats.seconds["prefill"])


def of_cycles(mine: Sequence[Timed], plain: Sequence[Timed], seed: int) -> dict[str, Any]:
    """A cycle's times, and the speedup over one token at a time beside its bound. plain: the same questions'."""
    rows = []
    for a, b in zip(mine, plain, strict=True):
        assert a.stats
        assert a.stages
        assert b.stats
        assert b.stages
        ms, base = cycle_ms(a.stages), cycle_ms(b.stages)
        speed = decoding_speed(a.stats)
        gain = speed / decoding_speed(b.stats)
        limit = bound(a.stats.acceptance_length, base["target"], ms["target"], ms["head"])
        figures = {
            "cycle": sum(ms.values()),
            "overhead": a.stages.overhead,
            "tokens_per_second": speed,
            "speedup": gain,
            "bound": limit,
            "speedup_by_bound": gain / limit,
        }
        rows.append(ms | figures)
    found: dict[str, Any] = {name: median([row[name] for row in rows], seed) for name in rows[0]}
    draws = resample(len(mine), RESAMPLES, seed)
    own, one = _totals(draws, mine), _totals(draws, plain)
    tau = own["tokens"] / own["cycles"]
    speedup = (own["tokens"] / own["decoding"]) / (one["tokens"] / one["decoding"])
    most = bound(
        tau,
        one["target"] / one["cycles"],
        own["target"] / own["cycles"],
        own["head"] / own["cycles"],
    )
    overall = {"speedup": speedup, "bound": most, "speedup_by_bound": speedup / most}
    found["overall"] = {name: interval(values) for name, values in overall.items()}
    return found | {"acceptance_length": interval(tau)}


def _totals(draws: np.ndarray, answers: Sequence[Timed]) -> dict[str, np.ndarray]:
    """[1 + R] totals of every resample: tokens, cycles, and seconds of decoding and of the forwards."""
    rows = []
    for answer in answers:
        stats, stages = answer.stats, answer.stages
        assert stats
        assert stages
        decoding = stats.seconds["total"] - stats.seconds["prefill"]
        forwards = (stages.seconds["target"], stages.seconds["head"])
        rows.append((stats.new_tokens, stats.cycles, decoding, *forwards))
    names = ("tokens", "cycles", "decoding", "target", "head")
    return dict(zip(names, (draws @ np.array(rows, dtype=float)).T, strict=True))


def of_speed(
    mine: Sequence[Timed], generate: Sequence[Timed] | None, one_token: Sequence[Timed], seed: int
) -> dict[str, Any]:
    """Tokens/s from prompt to last token, and over those of `model.generate` and of one token at a time."""
    draws = resample(len(mine), RESAMPLES, seed)
    own, total = _speeds(mine), _overall(draws, mine)
    found: dict[str, Any] = {"tokens_per_second": median(list(own), seed)}
    overall: dict[str, Any] = {"tokens_per_second": interval(total)}
    for name, others in (("over_generate", generate), ("over_one_token", one_token)):
        found[name] = median(list(own / _speeds(others)), seed) if others else None
        overall[name] = interval(total / _overall(draws, others)) if others else None
    return found | {"overall": overall}


def same(mine: Sequence[Timed], other: Sequence[Timed]) -> int:
    """How many answers have the very same tokens."""
    return sum(a.tokens == b.tokens for a, b in zip(mine, other, strict=True))


def _speeds(answers: Sequence[Timed]) -> np.ndarray:
    return np.array([len(answer.tokens) / answer.seconds for answer in answers])


def _overall(draws: np.ndarray, answers: Sequence[Timed]) -> np.ndarray:
    """[1 + R] tokens/s of every resample."""
    tokens, seconds = np.array(
        [(len(answer.tokens), answer.seconds) for answer in answers], dtype=float
    ).T
    return (draws @ tokens) / (draws @ seconds)
