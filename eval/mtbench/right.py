"""From verdicts to figures: the share of right answers, and its distance to the baseline's."""

import math
from collections.abc import Sequence

from treespec.eval.bootstrap import Figure
from treespec.eval.mtbench.result import Right, Row
from treespec.eval.verdict import interval

Z = 1.959964  # standard errors to either end of a 95 % interval


def right_figures(mine: Sequence[bool], baseline: Sequence[bool] | None) -> Right:
    """The figures of one configuration. baseline: the verdicts on the same questions, in order."""
    return {
        "answers": len(mine),
        "right": sum(mine),
        "share": wilson(sum(mine), len(mine)),
        "difference": None if baseline is None else paired_difference(mine, baseline),
        "same": None if baseline is None else _same(mine, baseline),
    }


def _same(mine: Sequence[bool], baseline: Sequence[bool]) -> int:
    return sum(ours == theirs for ours, theirs in zip(mine, baseline, strict=True))


def wilson(right: int, answers: int) -> Figure:
    """The share of right answers and its 95 % interval (Wilson 1927), which 0 and 1 have too."""
    share = right / answers
    weight = Z * Z / answers
    middle = (share + weight / 2) / (1 + weight)
    half = Z * math.sqrt(share * (1 - share) / answers + weight / (4 * answers)) / (1 + weight)
    return {"value": share, "low": max(middle - half, 0.0), "high": min(middle + half, 1.0)}


def paired_difference(mine: Sequence[bool], baseline: Sequence[bool]) -> Figure:
    """The share less the baseline's on the same questions, and its 95 % interval.

    The interval is that of Agresti and Min (2005) for matched pairs: Wald's after half an answer is
    added to each of the four kinds of pairs. So it has a width even where no verdict differs.
    """
    # 1. The pairs on which the verdicts differ.
    gained = sum(ours and not theirs for ours, theirs in zip(mine, baseline, strict=True))
    lost = sum(theirs and not ours for ours, theirs in zip(mine, baseline, strict=True))

    # 2. The interval around the shrunken difference.
    total = len(mine) + 2
    middle = (gained - lost) / total
    spread = (gained + lost + 1) / total - middle**2
    half = Z * math.sqrt(spread / total)
    value = (gained - lost) / len(mine)
    return {"value": value, "low": max(middle - half, -1.0), "high": min(middle + half, 1.0)}


def percent(figure: Figure | None) -> Figure | None:
    """A share or a difference of shares, in percent."""
    if figure is None:
        return None
    value, low, high = (
        None if part is None else 100 * part
        for part in (figure["value"], figure["low"], figure["high"])
    )
    return {"value": value, "low": low, "high": high}


def right_sentences(rows: Sequence[Row]) -> list[str]:
    """What right answers say about losslessness, temperature by temperature.

    Lossy pairs are left out: they may be right more or less often.
    """
    compared = [(row, row["right"]) for row in rows if row["lossless"] and row["right"]]
    lines = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        # 1. The pairs that have a baseline here.
        here = [
            (row["model_id"], right, right["difference"])
            for row, right in compared
            if row["temperature"] == temperature
        ]
        pairs = [(name, right, apart) for name, right, apart in here if apart is not None]
        if not pairs:
            continue

        # 2. The same verdicts, a difference within the interval, or one beyond it.
        at = f"At temperature {temperature:g}"
        beyond = [(name, apart) for name, _, apart in pairs if _beyond_chance(apart)]
        if all(right["same"] == right["answers"] for _, right, _ in pairs):
            _, right, _ = pairs[0]
            lines.append(
                f"{at} every pair answers the very questions rightly that the baseline does: "
                f"{right['right']} of {right['answers']}."
            )
        elif not beyond:
            lines.append(
                f"{at} every pair's share of right answers is the baseline's within the 95% "
                "interval."
            )
        else:
            names = [f"{name} {interval(percent(apart), digits=1)}" for name, apart in beyond]
            lines.append(
                f"{at} the share of right answers is not the baseline's: {', '.join(names)}. "
                "Chance does that to one lossless pair in twenty; `treespec certify` tells."
            )
    return lines


def _beyond_chance(difference: Figure) -> bool:
    """Whether the interval of a difference leaves out 0."""
    low, high = difference["low"], difference["high"]
    return low is not None and high is not None and (low > 0 or high < 0)
