"""Predicts from q how likely a head's most likely tokens are the target's choice.

A logistic model, fitted once on held-out text, predicts Pr(the r-th most likely token is the target's choice at
temperature 0) from its q, its rank and the depth. A calibration also has acceptance rates, and factors of the
draft logits.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
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
    """A head's calibration, saved beside it as calibration.json. Each field may be empty.

    Attributes:
        greedy: weights of the logistic model.
        rates: for each temperature, Pr(the first, second, … draw without replacement is accepted), counted
            on text of the target. The key 0.01 stands for temperature 0.
        sharpness: factors of the draft logits for each draft step above temperature 0, the last one for all
            further steps; empty: 1. Heads are less confident than their target, so sharper drafts are accepted
            more often. Drafting is lossless with any factors.

    Raises:
        ValueError: a number is missing, not finite, or not above 0.
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

    def predict_certain_choice(self, top: list[float], depth: int) -> list[float]:
        """Returns Pr(the r-th most likely token of a node is the target's choice at temperature 0), for each r.

        top: the node's largest probabilities at temperature 1, descending; returned as they are without a
        fitted model. depth: of the node.
        """
        if not self.greedy:
            return top
        of_logit = self.greedy[1]
        terms = list_rank_terms(self.greedy, len(top), depth)
        probabilities = []
        for probability, term in zip(top, terms, strict=True):
            logit = of_logit * compute_logit(probability) + term
            probabilities.append(0.5 + 0.5 * math.tanh(0.5 * logit))  # 1 / (1 + e^-logit)
        total = sum(probabilities)
        if total <= 1:
            return probabilities
        return [probability / total for probability in probabilities]


def find_nearest(by_temperature: Mapping[str, Known], temperature: float) -> Known:
    """Returns the entry whose temperature is nearest to this one, which must be above 0."""
    return by_temperature[min(by_temperature, key=lambda t: abs(math.log(float(t) / temperature)))]


def build_calibration_features(top: np.ndarray, depth: int) -> np.ndarray:
    """Returns [F, K, 4] the model's inputs. top: [F, K] the largest probabilities of nodes at a depth."""
    features = np.empty((*top.shape, NUM_FEATURES))
    features[..., 0] = 1.0
    limited = top.clip(MIN_CALIBRATED_PROBABILITY, 1 - MIN_CALIBRATED_PROBABILITY)
    features[..., 1] = np.log(limited / (1 - limited))
    features[..., 2] = np.log(np.arange(1, top.shape[1] + 1))
    features[..., 3] = depth
    return features


def compute_logit(probability: float) -> float:
    """Returns log(p / (1 - p)); one near 0 or 1 is limited."""
    limited = min(max(probability, MIN_CALIBRATED_PROBABILITY), 1 - MIN_CALIBRATED_PROBABILITY)
    return math.log(limited / (1 - limited))


@lru_cache
def list_rank_terms(weights: tuple[float, ...], children: int, depth: int) -> tuple[float, ...]:
    """Lists, for each child of a node, the terms of the model that its probability has no part in.

    weights: of `build_calibration_features`. children: of a node. depth: of the node.
    """
    constant, _, of_rank, of_depth = weights
    terms = []
    for rank in range(1, children + 1):
        terms.append(constant + of_rank * math.log(rank) + of_depth * depth)
    return tuple(terms)


def scale_by_sharpness(logits: "Tensor", depth: int, sharpness: tuple[float, ...]) -> "Tensor":
    """Multiplies draft logits for the children of nodes at a depth by the factor of `Calibration.sharpness`."""
    if not sharpness:
        return logits
    return logits * get_sharpness(depth, sharpness)


def get_sharpness(depth: int, sharpness: tuple[float, ...]) -> float:
    """Returns the factor of the draft logits for the children of nodes at a depth; 1 without fitted factors."""
    if not sharpness:
        return 1.0
    return sharpness[min(depth, len(sharpness) - 1)]


def save_calibration(calibration: Calibration, folder: str | Path) -> None:
    """Write calibration.json, whole or not at all. Raises InputError if that fails."""
    write_json(
        Path(folder) / CALIBRATION_FILE, {"format": CALIBRATION_FORMAT, **asdict(calibration)}
    )


def load_calibration(folder: str | Path) -> Calibration | None:
    """Reads the calibration beside a head; returns None without one.

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
        for temperature, child_rates in fields["rates"].items():
            rates[temperature] = tuple(map(float, child_rates))
        return Calibration(greedy, rates, sharpness)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is not understood: {RECALIBRATE_ADVICE}") from error
