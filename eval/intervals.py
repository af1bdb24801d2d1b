"""Figures with their 95 % intervals: the bootstrap over questions, and shares of right answers."""

import math
from collections.abc import Sequence
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

Array = NDArray[np.float64]

FEW = 10  # with fewer questions a percentile interval is markedly too narrow
Z = 1.959964  # standard errors to either end of a 95 % interval


class Figure(TypedDict):
    """A value and the ends of its 95 % interval; None where it is not finite or nothing varies."""

    value: float | None
    low: float | None
    high: float | None


def resample(questions: int, resamples: int, seed: int) -> Array:
    """[1 + R, Q] weights: how often each question counts in each resample.

    The first row counts every question once: it gives the value itself.
    """
    shares = [1 / questions] * questions
    drawn = np.random.default_rng(seed).multinomial(questions, shares, size=resamples)
    return np.concatenate([np.ones((1, questions)), drawn])


def interval(samples: Array) -> Figure:
    """The value and its 95 % percentile interval.

    samples: [1 + R], the value first, then that of each resample.
    """
    value, drawn = float(samples[0]), samples[1:][np.isfinite(samples[1:])]
    if not math.isfinite(value):
        return {"value": None, "low": None, "high": None}
    if not len(drawn) or not np.ptp(drawn):
        return {"value": value, "low": None, "high": None}
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {"value": value, "low": float(low), "high": float(high)}


def share_of(right: int, answers: int) -> Figure:
    """The share of right answers; its interval (Wilson 1927) has a width at 0 and 1 too."""
    limits = binomtest(right, answers).proportion_ci(method="wilson")
    return {"value": right / answers, "low": float(limits.low), "high": float(limits.high)}


def paired_difference(mine: Sequence[bool], base: Sequence[bool]) -> Figure:
    """The share of right answers less the baseline's on the same questions.

    The interval is that of Agresti and Min (2005) for matched pairs: Wald's after half an answer is
    added to each of the four kinds of pairs. So it has a width even where no verdict differs.
    """
    gained = sum(ours > theirs for ours, theirs in zip(mine, base, strict=True))
    lost = sum(ours < theirs for ours, theirs in zip(mine, base, strict=True))
    total = len(mine) + 2
    middle = (gained - lost) / total
    half = Z * math.sqrt(((gained + lost + 1) / total - middle**2) / total)
    value = (gained - lost) / len(mine)
    return {"value": value, "low": max(middle - half, -1.0), "high": min(middle + half, 1.0)}
