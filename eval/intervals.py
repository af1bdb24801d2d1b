"""Figures with their 95 % intervals: the bootstrap over questions, and shares of right answers."""

import math
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
    low = high = None
    if math.isfinite(value) and len(drawn) and np.ptp(drawn):
        low, high = map(float, np.quantile(drawn, [0.025, 0.975]))
    return {"value": value if math.isfinite(value) else None, "low": low, "high": high}


def share_of(right: int, answers: int) -> Figure:
    """The share of right answers; its interval (Wilson 1927) has a width at 0 and 1 too."""
    low, high = map(float, binomtest(right, answers).proportion_ci(method="wilson"))
    return {"value": right / answers, "low": low, "high": high}
