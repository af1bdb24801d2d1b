"""The verdict below tables: the fastest pair at each temperature, and pairs that do not pay."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NotRequired, TypedDict

from treespec.eval.bootstrap import Figure
from treespec.options import members_of


@dataclass(frozen=True)
class MeasuredPair:
    """A verifier and tree at one temperature.

    speedup: over plain decoding; None: plain decoding was not measured. of_fastest: the ratio of
    its tokens/s to those of the fastest pair; None for the fastest pair, or without a comparison.
    """

    name: str
    temperature: float
    tokens_per_second: float
    speedup: Figure | None
    lossless: bool = True
    of_fastest: Figure | None = None


class Overall(TypedDict):
    tokens_per_second: Figure
    speedup: Figure | None


class SummaryRow(TypedDict):
    """What a verdict reads of a row of `treespec.eval.mtbench.summary.summarise`."""

    drafter: NotRequired[str | None]
    verifier: str
    tree: str | None
    temperature: float
    lossless: bool
    overall: Overall
    of_fastest: Figure | None


def verdict(rows: Sequence[SummaryRow]) -> list[str]:
    """`sentences` about all rows but the baseline's."""
    several = len({row.get("drafter") for row in rows} - {None}) > 1
    pairs = []
    for row in rows:
        speed = row["overall"]["tokens_per_second"]["value"]
        if row["verifier"] != "baseline" and speed is not None:
            speedup, lossless = row["overall"]["speedup"], row["lossless"]
            name, temperature = pair_name(row, several), row["temperature"]
            pair = MeasuredPair(name, temperature, speed, speedup, lossless, row["of_fastest"])
            pairs.append(pair)
    return sentences(pairs)


def sentences(pairs: Sequence[MeasuredPair]) -> list[str]:
    """The verdict, temperature by temperature."""
    lines = []
    for temperature in dict.fromkeys(pair.temperature for pair in pairs):
        at = f"At temperature {temperature:g}"
        here = [pair for pair in pairs if pair.temperature == temperature]

        # 1. The fastest lossless pair, its equals, and lossy pairs that are faster.
        lossless = [pair for pair in here if pair.lossless]
        best = max(lossless, key=lambda pair: pair.tokens_per_second, default=None)
        if best:
            lines.append(f"{at} {_praise(best)}{_equals(lossless, best)}")
            faster = [pair for pair in here if pair.tokens_per_second > best.tokens_per_second]
            if faster:
                lossy = "these are faster, but change the law of the text"
                lines.append(f"{at} {lossy}: {_listed(faster)}.")

        # 2. Pairs that do not pay.
        slower = [pair for pair in here if _side(pair.speedup) == -1]
        if slower:
            lines.append(f"{at} these are slower than plain decoding: {_listed(slower)}.")
        unsure = [pair for pair in here if _side(pair.speedup) == 0]
        if unsure and unsure != [best]:
            neither = "these are neither faster nor slower for certain"
            lines.append(f"{at} {neither}: {_listed(unsure)}.")
    return lines


def interval(figure: Figure | None, digits: int = 2) -> str:
    """A value and its 95 % interval as a cell of a table: 1.49 (1.32–1.61)."""
    if figure is None or figure["value"] is None:
        return ""
    low, high = figure["low"], figure["high"]
    limits = "" if low is None or high is None else f" ({low:.{digits}f}–{high:.{digits}f})"
    return f"{figure['value']:.{digits}f}{limits}"


def _praise(best: MeasuredPair) -> str:
    """What the fastest lossless pair is worth."""
    if best.speedup is None:
        speed = f"{best.tokens_per_second:.1f} tokens/s"
        return f"the fastest is {best.name}: {speed}, without a baseline to compare with."
    times = f"{best.name}: {interval(best.speedup)} times plain decoding."
    if _side(best.speedup) == -1:
        return f"plain decoding is the fastest. The best pair is {times}"
    if _side(best.speedup) == 0:
        return f"no pair is faster than plain decoding for certain. The best is {times}"
    return f"the fastest is {times}"


def _equals(pairs: Sequence[MeasuredPair], best: MeasuredPair) -> str:
    """The pairs whose distance to the fastest may be chance."""
    near = [pair.name for pair in pairs if pair is not best and _side(pair.of_fastest) == 0]
    return f" As fast within the 95% interval: {', '.join(near)}." if near else ""


def _side(ratio: Figure | None) -> int | None:
    """-1: certainly below 1; 1: certainly above; 0: the interval holds 1; None: no ratio.

    Without an interval the value decides.
    """
    if ratio is None:
        return None
    value, low, high = ratio["value"], ratio["low"], ratio["high"]
    assert value is not None
    low = value if low is None else low
    high = value if high is None else high
    return 1 if low > 1 else -1 if high < 1 else 0


def _listed(pairs: Sequence[MeasuredPair]) -> str:
    return ", ".join(f"{pair.name} {interval(pair.speedup)}".strip() for pair in pairs)


def pair_name(row: SummaryRow, several: bool) -> str:
    """As `--verifier` names it, rrs-wo@2x4; with several drafters, its drafter before it."""
    name = row["verifier"] + (f"@{tree_name(row['tree'])}" if row["tree"] else "")
    return f"{short(row.get('drafter'))} with {name}" if several else name


def short(drafter: str | None) -> str:
    """The kind of a drafter, and the last part of its path."""
    members = [member.partition(":") for member in members_of(drafter or "")]
    return "+".join(kind + colon + PurePath(value).name for kind, colon, value in members)


def tree_name(tree: str | None) -> str:
    """A tree as `--tree` names it; a file without its folder."""
    return PurePath(tree).name if tree and tree.endswith(".json") else tree or ""
