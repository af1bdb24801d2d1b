"""Predict from q alone how likely a head's top tokens and draws are to be accepted.

Two logistic models are fitted once on held-out text. One gives Pr(the r-th likeliest token is
output) from its q, its rank and the depth. The other gives Pr(the i-th draw is accepted | the draws
before were refused) from the shape of q without the top tokens.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import numpy as np

from treespec.errors import InputError
from treespec.files.atomic import read_json, write_json

Known = TypeVar("Known")
FILE = "calibration.json"
AGAIN = "make it again with treespec calibrate"
COLDEST = 0.01  # the temperature whose rates are those of temperature 0
TOPS, DRAWS = 5, 6  # at most, at one node
TOP_FEATURES, DRAW_FEATURES = 4, 7
RANKS, TURNS = np.log(np.arange(1, TOPS + 1)), np.log(np.arange(1, DRAWS + 1))


@dataclass(frozen=True)
class Calibration:
    """Saved as calibration.json beside the head.

    tops, draws: weights of the two models. greedy: weights of the first model at temperature 0.
    sizes: by temperature, pairs (price of a node, mean nodes of a tree).
    rates: by temperature, Pr(the first, second, … draw without replacement is accepted), counted
    while the target writes. The key 0.01 stands for temperature 0.
    greedy and rates may be empty.
    """

    tops: tuple[float, ...]
    draws: tuple[float, ...]
    sizes: dict[str, list[tuple[float, float]]]
    greedy: tuple[float, ...] = ()
    rates: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def price(self, nodes: int, temperature: float) -> float:
        """The price of a node at which trees have `nodes` nodes on average."""
        return float(self.prices(nodes, temperature)[-1])

    def prices(self, most: int, temperature: float) -> np.ndarray:
        """[most - 1] the prices at which trees have 2, 3, … nodes on average.

        The known sizes are interpolated, both axes in logarithms. If several prices give the same
        size, the lowest counts.
        """
        dearest_first = sorted(nearest(self.sizes, temperature), reverse=True)
        cheapest = {size: price for price, size in dearest_first}
        size, price = np.log(sorted(cheapest.items())).T
        wanted = np.log(np.arange(2, most + 1))
        if len(size) == 1:
            return np.exp(price.repeat(len(wanted)))
        right = np.searchsorted(size, wanted).clip(1, len(size) - 1)
        slope = np.diff(price) / np.diff(size).clip(1e-9)
        return np.exp(price[right - 1] + slope[right - 1] * (wanted - size[right - 1]))

    def sure(self, law: np.ndarray, depth: int) -> np.ndarray:
        """[F, K] Pr(the r-th likeliest token is the target's choice at temperature 0), at a depth.

        law: [F, K] probabilities of the likeliest tokens at temperature 1, descending. Without a
        fitted model it is the result.
        """
        if not self.greedy:
            return law
        from scipy.special import expit  # reading a file does without scipy

        one, odds, rank, deep = self.greedy
        place = np.log(np.arange(1, law.shape[1] + 1))
        chance = expit(log_odds(law, 1e-6) * odds + (place * rank + (one + deep * depth)))
        return chance / chance.sum(-1, keepdims=True).clip(1)

    def chances(self, outlines: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """For F nodes: Pr(the r-th likeliest is output), Pr(the i-th draw is accepted).

        outlines: [F, J + 2] by `outlines.outline`. depth: of the nodes. Returns [F, J] and [F, J + 1, M];
        column j of the latter is for nodes whose first j children are the top tokens.
        """
        from scipy.special import expit

        # 1. Top tokens.
        top, largest_left, square, left = seen(outlines)
        one, odds, rank, deep = self.tops
        tops = expit(top * odds + (RANKS * rank + (one + deep * depth)))
        tops /= tops.sum(-1, keepdims=True).clip(1)

        # 2. Draws, given that those before were refused.
        one, odds, even, room, turn, turn_even, deep = self.draws
        first = largest_left * odds + square * even + left * room + (one + deep * depth)
        refused = np.ones((*first.shape, DRAWS + 1))
        score = first[..., None] + (square * turn_even + turn)[..., None] * TURNS
        expit(-score).cumprod(-1, out=refused[..., 1:])  # [F, J + 1, M]

        # 3. Unconditionally: neither a top token nor an earlier draw is output.
        untaken = np.ones(first.shape)
        untaken[:, 1:] -= tops.cumsum(-1)
        return tops, untaken.clip(0)[..., None] * (refused[..., :-1] - refused[..., 1:])


def nearest(known: Mapping[str, Known], temperature: float) -> Known:
    """The entry for the temperature nearest to this one, which is above 0."""
    return known[min(known, key=lambda t: abs(math.log(float(t) / temperature)))]


def seen(outlines: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Features of F nodes: log-odds of the tops [F, J], and three of the residuals [F, J + 1].

    A residual is q without 0 to J tops. Its features are the log-odds of its largest probability,
    the log of its sum of squares, and the log of its mass.
    """
    top = outlines[:, :-1].clip(1e-9, 1 - 1e-6)  # [F, J + 1]
    taken = np.zeros(top.shape)
    taken[:, 1:] = top[:, :-1]
    left = (1 - taken.cumsum(-1)).clip(1e-6)
    square = (outlines[:, -1:] - (taken * taken).cumsum(-1)) / (left * left)
    return (
        log_odds(top[:, :-1], 0),
        log_odds(top / left, 1e-6),
        np.log(square.clip(1e-6, 1)),
        np.log(left),
    )


def log_odds(chance: np.ndarray, least: float) -> np.ndarray:
    """log(p / (1 - p)) with p clipped to [least, 1 - least]."""
    chance = chance.clip(least, 1 - least)
    return np.log(chance / (1 - chance))


def save_calibration(calibration: Calibration, folder: str | Path) -> None:
    """Write calibration.json, whole or not at all. Raises InputError if that fails."""
    write_json(Path(folder) / FILE, asdict(calibration))


def load_calibration(folder: str | Path) -> Calibration | None:
    """The calibration beside a head, or None without one.

    Raises InputError for a damaged or unknown file.
    """
    file = Path(folder) / FILE
    if not file.exists():
        return None
    fields = read_json(file, AGAIN)
    try:
        # 1. All values are finite numbers.
        sizes = {}
        for temperature, pairs in fields["sizes"].items():
            sizes[temperature] = [numbers(pair, positive=True) for pair in pairs]
        tops, draws = numbers(fields.get("tops", ())), numbers(fields.get("draws", ()))
        greedy = numbers(fields.get("greedy", ()))
        rates = {t: numbers(known) for t, known in fields.get("rates", {}).items()}
        numbers([*sizes, *rates], positive=True)  # temperatures

        # 2. Nothing is missing.
        lengths = len(tops), len(draws), len(greedy) or TOP_FEATURES
        pairs_of_two = all(len(pair) == 2 for pairs in sizes.values() for pair in pairs)
        filled = bool(sizes) and all((*sizes.values(), *rates.values()))
        if lengths != (TOP_FEATURES, DRAW_FEATURES, TOP_FEATURES) or not filled or not pairs_of_two:
            raise ValueError("weights, sizes or rates are missing")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise InputError(f"{file} is not understood: {AGAIN}") from error
    checked = cast(dict[str, list[tuple[float, float]]], sizes)
    return Calibration(tops, draws, checked, greedy, rates)


def numbers(values: Iterable[float | str], positive: bool = False) -> tuple[float, ...]:
    """The values as floats.

    Raises ValueError or TypeError unless all are finite, and above 0 if `positive`.
    """
    floats = tuple(map(float, values))
    if not all(math.isfinite(value) and (value > 0 or not positive) for value in floats):
        raise ValueError("no such number")
    return floats
