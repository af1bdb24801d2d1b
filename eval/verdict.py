"""The verdict below tables: which pairs are faster than plain decoding, which are slower.

An interval over questions does not hold what a busy machine does to the clock. So plain decoding is
measured twice (A/A), and its ratio to itself gives the clock's noise: a pair is called faster or
slower only where its whole interval lies beyond 1 by more than that.
"""

import math
from collections.abc import Sequence

from treespec.eval.figures import Row, Summary
from treespec.eval.intervals import MIN_QUESTIONS, Figure
from treespec.eval.report import escape_cell

LEAST_TAU = 1.02  # below it drafts brought nothing, and a difference is the clock's
VERDICT_SIDES = {
    1: "these are faster than plain decoding, the fastest first",
    0: "these are neither faster nor slower for certain",
    -1: "these are slower than plain decoding",
}


def write_verdict(summary: Summary) -> list[str]:
    """By batch size and temperature: what is faster than plain decoding, and what is slower."""
    noises = {
        (a["batch"], a["temperature"]): estimate_noise(a["speedup"]) for a in summary["again"]
    }
    pairs: dict[tuple[int, float], list[Row]] = {}
    for row in summary["rows"]:
        if row["drafter"] and row["overall"]["tokens_per_second"]["value"]:
            pairs.setdefault((row["batch"], row["temperature"]), []).append(row)
    lines = []
    for (batch, temperature), rows in sorted(pairs.items()):
        place = f"At temperature {temperature:g}"
        if batch > 1:
            place += f", in batches of {batch},"
        noise = noises.get((batch, temperature))
        for sentence in write_sentences(rows, summary["questions"], noise):
            lines.append(f"{place} {sentence}")
    return lines


def write_sentences(pairs: Sequence[Row], questions: int, noise: float | None) -> list[str]:
    """What is faster or slower of the rows of one temperature and batch size, or why nobody can say.

    noise: the clock's; without it nothing is called faster or slower.
    """
    if questions < MIN_QUESTIONS:
        few = "1 question is" if questions == 1 else f"{questions} questions are"
        return [f"{few} too few to say what is faster or slower: ask {MIN_QUESTIONS} or more."]
    if noise is None:
        unknown = "plain decoding was not measured twice, so the clock's noise is unknown"
        return [f"nothing is called faster or slower: {unknown}."]
    of_side: dict[int, list[str]] = {side: [] for side in VERDICT_SIDES}
    for row in sorted(pairs, key=lambda row: -row["overall"]["tokens_per_second"]["value"]):
        side, why = decide_side(row, noise)
        name = " ".join(filter(None, row["labels"][:3]))
        of_side[side].append(f"{name} {escape_cell(row['overall']['speedup'])}{why}")
    lines = []
    for side, names in of_side.items():
        if names:
            lines.append(f"{VERDICT_SIDES[side]}: {'; '.join(names)}.")
    return lines


def decide_side(row: Row, noise: float) -> tuple[int, str]:
    """Tell on which side of 1 a row's speedup is, as `compare_with_noise` does; if it is 0, why nothing can be said."""
    speedup = row["overall"]["speedup"]
    tau = row["overall"]["acceptance_length"]["value"] or 1.0
    if tau < LEAST_TAU:
        return 0, f", as drafts brought nothing (τ {tau:.3f})"
    if not compare_with_noise(speedup, 0.0):
        return 0, ", whose interval holds 1"
    side = compare_with_noise(speedup, noise)
    if side == 0:
        return 0, f", inside the clock's noise of ±{100 * noise:.1f} %"
    return side, ""


def compare_with_noise(ratio: Figure, noise: float) -> int:
    """Tell on which side of 1 a ratio is by more than the noise: -1 is below, 1 above, 0 neither.

    The whole interval counts; without an interval the value.
    """
    value = ratio["value"] or 0.0
    low = value if ratio["low"] is None else ratio["low"]
    high = value if ratio["high"] is None else ratio["high"]
    if low > 1 + noise:
        return 1
    if high * (1 + noise) < 1:
        return -1
    return 0


def estimate_noise(again: Figure | None) -> float | None:
    """The clock's noise: how far the interval of an A/A ratio reaches from 1, as a share.

    None where it has no interval.
    """
    if again is None or again["low"] is None or again["high"] is None:
        return None
    if not again["low"]:
        return math.inf
    return max(again["high"], 1 / again["low"]) - 1
