"""Predict from q alone how likely a head's top tokens and draws are to be accepted.

Two logistic models are fitted once on held-out text. One gives Pr(the r-th most likely token is
output) from its q, its rank and the depth. The other gives Pr(the i-th draw is accepted | the draws
before were refused) from the shape of q without the top tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from treespec.errors import InputError
from treespec.files.atomic import read_json, write_json

if TYPE_CHECKING:
    from torch import Tensor

Known = TypeVar("Known")
FILE = "calibration.json"
FORMAT = 1
AGAIN = "delete it and make it again with treespec calibrate"
COLDEST = 0.01  # the temperature whose rates are those of temperature 0
TOPS, DRAWS = 5, 6  # at most, at one node
TOP_FEATURES, DRAW_FEATURES = 4, 7


@dataclass(frozen=True)
class Calibration:
    """Saved as calibration.json beside the head.

    tops, draws: weights of the two models. greedy: weights of the first model at temperature 0.
    rates: by temperature, Pr(the first, second, … draw without replacement is accepted), counted
    while the target writes. The key 0.01 stands for temperature 0. sharpness: factors of the draft logits
    by draft step above temperature 0, the last one for all further steps; none: 1. Heads are less sure
    than their target, and sharper drafts are accepted more often; whatever they are, drafting is lossless.
    greedy, rates and sharpness may be empty. Raises ValueError for numbers that no fit gives.
    """

    tops: tuple[float, ...]
    draws: tuple[float, ...]
    greedy: tuple[float, ...] = ()
    rates: dict[str, tuple[float, ...]] = field(default_factory=dict)
    sharpness: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        lengths = len(self.tops), len(self.draws), len(self.greedy) or TOP_FEATURES
        numbers = chain(self.tops, self.draws, self.greedy, *self.rates.values(), self.sharpness)
        above_zero = (*map(float, self.rates), *self.sharpness)
        positive = all(map(len, self.rates.values())) and all(x > 0 for x in above_zero)
        whole = lengths == (TOP_FEATURES, DRAW_FEATURES, TOP_FEATURES) and positive
        if not whole or not all(map(math.isfinite, numbers)):
            raise ValueError("weights or rates are missing")

    def sure(self, top: np.ndarray, depth: int) -> np.ndarray:
        """[F, K] Pr(the r-th most likely token is the target's choice at temperature 0), at a depth.

        top: [F, K] the largest probabilities at temperature 1, descending. Without a fitted model they
        are the result.
        """
        if not self.greedy:
            return top
        return output_probabilities(self.greedy, features_of_tops(log_odds(top, 1e-6), depth))

    def chances(self, outlines: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """For F nodes: Pr(the r-th most likely is output), Pr(the i-th draw is accepted).

        outlines: [F, J + 2] by `outline`. depth: of the nodes. Returns [F, J] and [F, J + 1, M];
        column j of the latter is for nodes whose first j children are the top tokens.
        """
        from scipy.special import expit  # reading a file does without scipy

        # 1. Top tokens.
        of_tops, of_draws = features_of(outlines, depth)
        tops = output_probabilities(self.tops, of_tops)

        # 2. Draws, if neither a top token nor an earlier draw is output.
        refused = expit(-(of_draws @ self.draws)).cumprod(-1)  # [F, J + 1, M]
        reached = np.pad(refused, ((0, 0), (0, 0), (1, 0)), constant_values=1.0)[..., :-1]
        untaken = np.pad(1 - tops.cumsum(-1), ((0, 0), (1, 0)), constant_values=1.0)
        return tops, untaken.clip(0)[..., None] * (reached - refused)


def output_probabilities(weights: tuple[float, ...], features: np.ndarray) -> np.ndarray:
    """[F, K] Pr(each of the top tokens is output), in sum at most 1. features: [F, K, 4]."""
    from scipy.special import expit

    probabilities: np.ndarray = expit(features @ weights)
    return probabilities / probabilities.sum(-1, keepdims=True).clip(1)


def nearest(known: Mapping[str, Known], temperature: float) -> Known:
    """The entry for the temperature nearest to this one, which is above 0."""
    return known[min(known, key=lambda t: abs(math.log(float(t) / temperature)))]


def features_of_tops(odds: np.ndarray, depth: int) -> np.ndarray:
    """[F, K, 4] features of the top tokens. odds: [F, K] log-odds of their probabilities."""
    ranks = np.log(np.arange(1, odds.shape[1] + 1))
    return np.stack(np.broadcast_arrays(1.0, odds, ranks, depth), -1)


def features_of(outlines: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Features of F nodes: of each top [F, J, 4], of each draw [F, J + 1, M, 7].

    Draws come from a residual, q without 0 to J tops. Its features are the log-odds of its largest
    probability, the log of its sum of squares, and the log of its mass. outlines: by `outline`.
    """
    top = outlines[:, :-1].clip(1e-9, 1 - 1e-6)  # [F, J + 1]
    taken = np.pad(top[:, :-1], ((0, 0), (1, 0)))
    left = (1 - taken.cumsum(-1)).clip(1e-6)
    square = (outlines[:, -1:] - (taken * taken).cumsum(-1)) / (left * left)
    largest_left, square, mass = (
        x[..., None]
        for x in (log_odds(top / left, 1e-6), np.log(square.clip(1e-6, 1)), np.log(left))
    )
    turns = np.log(np.arange(1, DRAWS + 1))
    of_draws = np.broadcast_arrays(1.0, largest_left, square, mass, turns, square * turns, depth)
    return features_of_tops(log_odds(top[:, :-1], 0), depth), np.stack(of_draws, -1)


def outline(q: "Tensor") -> "Tensor":
    """[F, J + 2] float64: all that the models see of the distributions q [F, V].

    The J + 1 largest probabilities of each, and the sum of its squares.
    """
    from torch import cat, linalg  # reading a file does without torch
    from torch.nn.functional import pad

    from treespec.shaping.sampling import largest

    count = min(TOPS + 1, q.shape[-1])
    top = pad(largest(q, count)[0], (0, TOPS + 1 - count))
    return cat([top, linalg.vecdot(q, q)[:, None]], dim=1).double()


def log_odds(p: np.ndarray, least: float) -> np.ndarray:
    """log(p / (1 - p)) with p clipped to [least, 1 - least]."""
    p = p.clip(least, 1 - least)
    return np.log(p / (1 - p))


def sharpened(logits: "Tensor", depth: int, sharpness: tuple[float, ...]) -> "Tensor":
    """Draft logits of any shape for the children of nodes at a depth. sharpness: as of `Calibration`."""
    return logits * sharpness[min(depth, len(sharpness) - 1)] if sharpness else logits


def save_calibration(calibration: Calibration, folder: str | Path) -> None:
    """Write calibration.json, whole or not at all. Raises InputError if that fails."""
    write_json(Path(folder) / FILE, {"format": FORMAT, **asdict(calibration)})


def load_calibration(folder: str | Path) -> Calibration | None:
    """The calibration beside a head, or None without one.

    Raises InputError for a damaged file and for one of another format.
    """
    file = Path(folder) / FILE
    if not file.exists():
        return None
    fields = read_json(file, AGAIN, FORMAT)
    try:
        named = {
            name: tuple(map(float, fields[name]))
            for name in ("tops", "draws", "greedy", "sharpness")
        }
        rates = {t: tuple(map(float, known)) for t, known in fields["rates"].items()}
        return Calibration(**named, rates=rates)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is not understood: {AGAIN}") from error
