"""Write the verdict below the tables: which pairs of drafter and verifier are faster than plain decoding.

An interval over questions does not contain a busy machine's effect on the clock. So plain decoding is measured twice
(A/A), and the ratio of the two speeds shows the clock's noise. A pair is called faster or slower only if its whole
interval is beyond 1 by more than that noise.
"""

import math
from collections.abc import Sequence

from treespec.eval.config import is_oracle
from treespec.eval.figures import Row, Summary
from treespec.eval.intervals import MIN_QUESTIONS, Figure
from treespec.eval.report import escape_cell

LEAST_TAU = 1.02  # below this acceptance length drafts save nothing, so a difference in speed is the clock's noise
VERDICT_SIDES = {
    1: "faster than plain decoding, the fastest first",
    0: "no significant difference",
    -1: "slower than plain decoding",
}


def write_verdict(summary: Summary) -> list[str]:
    """Write which pairs are faster than plain decoding and which are slower, for each batch size and temperature."""
    noises = {}
    for repeat in summary["again"]:
        noises[repeat["batch"], repeat["temperature"]] = estimate_noise(repeat["speedup"])
    pairs: dict[tuple[int, float], list[Row]] = {}
    for row in summary["rows"]:
        has_speed = row["overall"]["tokens_per_second"]["value"]
        if row["drafter"] and has_speed and not is_oracle(row["drafter"]):
            pairs.setdefault((row["batch"], row["temperature"]), []).append(row)
    lines = []
    for (batch, temperature), rows in sorted(pairs.items()):
        conditions = f"Temperature {temperature:g}"
        if batch > 1:
            conditions += f", in batches of {batch}"
        noise = noises.get((batch, temperature))
        for sentence in write_sentences(rows, summary["questions"], noise):
            lines.append(f"{conditions}: {sentence}")
    return lines


def write_sentences(pairs: Sequence[Row], questions: int, noise: float | None) -> list[str]:
    """Write the sentences of one temperature and batch size.

    Args:
        pairs: rows of the report.
        questions: number of questions; with fewer than `MIN_QUESTIONS` the only sentence says that they are too few.
        noise: the clock's noise as a share; None if it is unknown, and then no pair is called faster or slower.
    """
    if questions < MIN_QUESTIONS:
        question_count = f"{questions} questions are"
        if questions == 1:
            question_count = "one question is"
        return [
            f"{question_count} too few to say what is faster or slower: ask {MIN_QUESTIONS} or more."
        ]
    if noise is None:
        reason = "plain decoding was not measured twice, so the clock's noise is unknown"
        return [f"nothing is called faster or slower: {reason}."]
    names_by_side: dict[int, list[str]] = {side: [] for side in VERDICT_SIDES}
    for row in sorted(pairs, key=lambda row: -row["overall"]["tokens_per_second"]["value"]):
        side, side_reason = decide_side(row, noise)
        name = " ".join(filter(None, row["labels"][:3]))
        names_by_side[side].append(f"{name} {escape_cell(row['overall']['speedup'])}{side_reason}")
    lines = []
    for side, names in names_by_side.items():
        if names:
            lines.append(f"{VERDICT_SIDES[side]}: {'; '.join(names)}.")
    return lines


def decide_side(row: Row, noise: float) -> tuple[int, str]:
    """Decide whether a row is faster (1) or slower (-1) than plain decoding, or neither (0) and for what reason."""
    speedup = row["overall"]["speedup"]
    tau = row["overall"]["acceptance_length"]["value"] or 1.0
    if tau < LEAST_TAU:
        return 0, f", as drafts brought nothing (τ {tau:.3f})"
    if not compare_with_noise(speedup, 0.0):
        return 0, ", interval includes 1"
    side = compare_with_noise(speedup, noise)
    if side == 0:
        return 0, f", within timing noise (±{100 * noise:.1f} %)"
    return side, ""


def compare_with_noise(ratio: Figure, noise: float) -> int:
    """Decide whether a ratio is above 1 by more than the noise (1), below 1 (-1), or neither (0).

    The whole interval must be above or below; without an interval the value counts.
    """
    value = ratio["value"] or 0.0
    low = value if ratio["low"] is None else ratio["low"]
    high = value if ratio["high"] is None else ratio["high"]
    if low > 1 + noise:
        return 1
    if high * (1 + noise) < 1:
        return -1
    return 0


def estimate_noise(repeat_ratio: Figure | None) -> float | None:
    """Estimate the clock's noise: how far the interval of an A/A ratio reaches from 1, as a share.

    Returns None if the ratio has no interval.
    """
    if repeat_ratio is None or repeat_ratio["low"] is None or repeat_ratio["high"] is None:
        return None
    if not repeat_ratio["low"]:
        return math.inf
    return max(repeat_ratio["high"], 1 / repeat_ratio["low"]) - 1
