"""Predict from q alone how likely a head's most likely tokens are the target's choice.

A logistic model, fitted once on held-out text, gives Pr(the r-th most likely token is the target's choice at
temperature 0) from its q, its rank and the depth. Rates and factors of the draft logits stand beside it.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from treespec.errors import InputError
from treespec.files.atomic import read_json, write_json

if TYPE_CHECKING:
    from torch import Tensor

Known = TypeVar("Known")
CALIBRATION_FILE = "calibration.json"
CALIBRATION_FORMAT = 2
RECALIBRATE_ADVICE = "delete it and make it again with treespec calibrate"
GREEDY_TEMPERATURE = 0.01  # the temperature whose rates are those of temperature 0
NUM_FEATURES = 4
MIN_CALIBRATED_PROBABILITY = 1e-6


@dataclass(frozen=True)
class Calibration:
    """Saved as calibration.json beside the head.

    greedy: weights of the model. rates: by temperature, Pr(the first, second, … draw without replacement
    is accepted), counted while the target writes. The key 0.01 stands for temperature 0. sharpness: factors
    of the draft logits by draft step above temperature 0, the last one for all further steps; none: 1.
    Heads are less sure than their target, and sharper drafts are accepted more often; whatever they are,
    drafting is lossless. Each may be empty. Raises ValueError for numbers that no fit gives.
    """

    greedy: tuple[float, ...] = ()
    rates: dict[str, tuple[float, ...]] = field(default_factory=dict)
    sharpness: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.greedy) not in (0, NUM_FEATURES) or not all(self.rates.values()):
            raise ValueError("weights or rates are missing")
        above_zero = list(self.sharpness)
        above_zero += map(float, self.rates)
        if not all(number > 0 for number in above_zero):
            raise ValueError("factors or temperatures are not above 0")
        numbers = [*self.greedy, *self.sharpness]
        for rates in self.rates.values():
            numbers += rates
        if not all(map(math.isfinite, numbers)):
            raise ValueError("weights or rates are not numbers")

    def predict_certain_choice(self, top: np.ndarray, depth: int) -> np.ndarray:
        """[F, K] Pr(the r-th most likely token is the target's choice at temperature 0), at a depth.

        top: [F, K] the largest probabilities at temperature 1, descending. Without a fitted model they
        are the result.
        """
        if not self.greedy:
            return top
        from scipy.special import expit  # reading a file does without scipy

        probabilities: np.ndarray = expit(build_calibration_features(top, depth) @ self.greedy)
        return probabilities / probabilities.sum(-1, keepdims=True).clip(1)


def find_nearest(known: Mapping[str, Known], temperature: float) -> Known:
    """The entry for the temperature nearest to this one, which is above 0."""
    return known[min(known, key=lambda t: abs(math.log(float(t) / temperature)))]


def build_calibration_features(top: np.ndarray, depth: int) -> np.ndarray:
    """[F, K, 4] what the model sees of the K largest probabilities [F, K] of nodes at a depth."""
    top = top.clip(MIN_CALIBRATED_PROBABILITY, 1 - MIN_CALIBRATED_PROBABILITY)
    ranks = np.log(np.arange(1, top.shape[1] + 1))
    return np.stack(np.broadcast_arrays(1.0, np.log(top / (1 - top)), ranks, depth), -1)


def scale_by_sharpness(logits: "Tensor", depth: int, sharpness: tuple[float, ...]) -> "Tensor":
    """Draft logits of any shape for the children of nodes at a depth. sharpness: as of `Calibration`."""
    if not sharpness:
        return logits
    return logits * sharpness[min(depth, len(sharpness) - 1)]


def save_calibration(calibration: Calibration, folder: str | Path) -> None:
    """Write calibration.json, whole or not at all. Raises InputError if that fails."""
    write_json(
        Path(folder) / CALIBRATION_FILE, {"format": CALIBRATION_FORMAT, **asdict(calibration)}
    )


def load_calibration(folder: str | Path) -> Calibration | None:
    """The calibration beside a head, or None without one.

    Raises InputError for a damaged file and for one of another format.
    """
    file = Path(folder) / CALIBRATION_FILE
    if not file.exists():
        return None
    fields = read_json(file, RECALIBRATE_ADVICE, CALIBRATION_FORMAT)
    try:
        greedy = tuple(map(float, fields["greedy"]))
        sharpness = tuple(map(float, fields["sharpness"]))
        rates = {}
        for temperature, of_children in fields["rates"].items():
            rates[temperature] = tuple(map(float, of_children))
        return Calibration(greedy, rates, sharpness)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is not understood: {RECALIBRATE_ADVICE}") from error
