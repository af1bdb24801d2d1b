"""The bootstrap over questions: each resample draws whole questions with replacement."""

import math
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


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


def medians(values: Array, draws: Array) -> Array:
    """[1 + R] medians of values [Q] in each resample. draws: [1 + R, Q], by `resample`."""
    order = np.argsort(values)
    below = np.cumsum(draws[:, order], axis=1)  # [1 + R, Q] values up to each, in their order
    middle = below[:, -1:] / 2
    low, high = (below >= middle).argmax(1), (below > middle).argmax(1)
    return (values[order][low] + values[order][high]) / 2


def interval(samples: Array) -> Figure:
    """The value and its 95 % percentile interval.

    samples: [1 + R], the value first, then that of each resample.
    """
    drawn = samples[1:][np.isfinite(samples[1:])]
    low, high = np.quantile(drawn, [0.025, 0.975]) if len(drawn) and np.ptp(drawn) else (None, None)
    return {"value": _finite(samples[0]), "low": _finite(low), "high": _finite(high)}


def _finite(x: float | None) -> float | None:
    return None if x is None or not math.isfinite(x) else float(x)
