"""The verdict below tables: which pairs are faster than plain decoding, which are slower.

An interval over questions does not hold what a busy machine does to the clock. So plain decoding is
measured twice (A/A), and its ratio to itself gives the clock's noise: a pair is called faster or
slower only where its whole interval lies beyond 1 by more than that.
"""

import math
from collections.abc import Sequence

from treespec.eval.figures import Row, Summary
from treespec.eval.intervals import FEW, Figure
from treespec.eval.report import shown

LEAST_TAU = 1.02  # below it drafts brought nothing, and a difference is the clock's
SIDES = {
    1: "these are faster than plain decoding, the fastest first",
    0: "these are neither faster nor slower for certain",
    -1: "these are slower than plain decoding",
}


def verdict(summary: Summary) -> list[str]:
    """By batch size and temperature: what is faster than plain decoding, and what is slower."""
    noises = {(a["batch"], a["temperature"]): noise_of(a["speedup"]) for a in summary["again"]}
    pairs: dict[tuple[int, float], list[Row]] = {}
    for row in summary["rows"]:
        if row["drafter"] and row["overall"]["tokens_per_second"]["value"]:
            pairs.setdefault((row["batch"], row["temperature"]), []).append(row)
    return [
        f"At temperature {heat:g}{f', in batches of {batch},' if batch > 1 else ''} {line}"
        for (batch, heat), rows in sorted(pairs.items())
        for line in sentences(rows, summary["questions"], noises.get((batch, heat)))
    ]


def sentences(pairs: Sequence[Row], questions: int, noise: float | None) -> list[str]:
    """What is faster or slower of the rows of one temperature and batch size, or why nobody can say.

    noise: the clock's; without it nothing is called faster or slower.
    """
    if questions < FEW:
        few = f"{questions} question{'s are' if questions > 1 else ' is'} too few"
        return [f"{few} to say what is faster or slower: ask {FEW} or more."]
    if noise is None:
        unknown = "plain decoding was not measured twice, so the clock's noise is unknown"
        return [f"nothing is called faster or slower: {unknown}."]
    of_side: dict[int, list[str]] = {side: [] for side in SIDES}
    for row in sorted(pairs, key=lambda row: -row["overall"]["tokens_per_second"]["value"]):
        side, why = side_of(row, noise)
        name = " ".join(filter(None, row["labels"][:3]))
        of_side[side].append(f"{name} {shown(row['overall']['speedup'])}{why}")
    return [f"{SIDES[side]}: {'; '.join(names)}." for side, names in of_side.items() if names]


def side_of(row: Row, noise: float) -> tuple[int, str]:
    """`beyond` of the speedup, and why nothing can be said where it is 0."""
    speedup = row["overall"]["speedup"]
    tau = row["overall"]["acceptance_length"]["value"] or 1.0
    if tau < LEAST_TAU:
        return 0, f", as drafts brought nothing (τ {tau:.3f})"
    if not beyond(speedup, 0.0):
        return 0, ", whose interval holds 1"
    side = beyond(speedup, noise)
    return side, "" if side else f", inside the clock's noise of ±{100 * noise:.1f} %"


def beyond(ratio: Figure, noise: float) -> int:
    """-1: below 1 by more than the noise; 1: above; 0: neither.

    The whole interval counts; without an interval the value.
    """
    low, high = ((ratio["value"] if x is None else x) or 0.0 for x in (ratio["low"], ratio["high"]))
    return (low > 1 + noise) - (high * (1 + noise) < 1)


def noise_of(again: Figure | None) -> float | None:
    """The clock's noise: how far the interval of an A/A ratio reaches from 1, as a share.

    None where it has no interval.
    """
    if again is None or again["low"] is None or again["high"] is None:
        return None
    if not again["low"]:
        return math.inf
    return max(again["high"], 1 / again["low"]) - 1
