"""The bootstrap over questions: whole ones are resampled."""

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def resample(questions: int, resamples: int, seed: int) -> Array:
    """[1 + R, Q] how often each question counts: once in the first row, then as drawn with replacement."""
    drawn = np.random.default_rng(seed).multinomial(
        questions, [1 / questions] * questions, size=resamples
    )
    return np.concatenate([np.ones((1, questions)), drawn])


def interval(samples: Array) -> dict[str, float | None]:
    """The value and its 95 % percentile interval, None where nothing varies. samples: [1 + R], the value first."""
    value, drawn = samples[0], samples[1:][np.isfinite(samples[1:])]
    low, high = np.quantile(drawn, [0.025, 0.975]) if len(drawn) and np.ptp(drawn) else (None, None)
    return {name: _number(x) for name, x in (("value", value), ("low", low), ("high", high))}


def _number(x: float | None) -> float | None:
    return None if x is None or not math.isfinite(x) else float(x)
