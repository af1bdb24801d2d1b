"""What an evaluation comes to: the fastest pair at each temperature, and what is slower than plain decoding."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

Figure = dict[str, float | None]


@dataclass(frozen=True)
class Pair:
    """A verifier and tree at one temperature. speedup: over plain decoding, None if that was not measured.

    of_fastest: its tokens/s over the fastest pair's, None of the fastest itself or where nothing compares them.
    """

    name: str
    temperature: float
    tokens_per_second: float
    speedup: Figure | None
    lossless: bool = True
    of_fastest: Figure | None = None


def verdict(summary: dict[str, Any]) -> list[str]:
    """A few sentences about the rows of `treespec.eval.mtbench.summary.summarise`."""
    several = len({row.get("drafter") for row in summary["configurations"]} - {None}) > 1
    pairs = [
        Pair(
            name=_name(row, several),
            temperature=row["temperature"],
            tokens_per_second=row["overall"]["tokens_per_second"]["value"],
            speedup=row["overall"]["speedup"],
            lossless=row["lossless"],
            of_fastest=row["of_fastest"],
        )
        for row in summary["configurations"]
        if row["verifier"] != "baseline"
    ]
    return sentences(pairs)


def sentences(pairs: Sequence[Pair]) -> list[str]:
    """For each temperature: the fastest lossless pair, its equals, and who is slower than plain decoding."""
    lines = []
    for temperature in dict.fromkeys(pair.temperature for pair in pairs):
        here = [pair for pair in pairs if pair.temperature == temperature]
        lossless = [pair for pair in here if pair.lossless]
        at = f"At temperature {temperature:g}"
        best = max(lossless, key=lambda pair: pair.tokens_per_second, default=None)
        if best:
            lines.append(f"{at} {_praise(best)}{_equals(lossless, best)}")
            faster = [pair for pair in here if pair.tokens_per_second > best.tokens_per_second]
            if faster:
                lines.append(
                    f"{at} these are faster, but change the law of the text: {_listed(faster)}."
                )
        if slower := [pair for pair in here if pair.speedup and _side(pair.speedup) < 0]:
            lines.append(f"{at} these are slower than plain decoding: {_listed(slower)}.")
        unsure = [pair for pair in here if pair.speedup and _side(pair.speedup) == 0]
        if unsure and unsure != [best]:
            lines.append(
                f"{at} these are neither faster nor slower for certain: {_listed(unsure)}."
            )
    return lines


def interval(figure: Figure | None, digits: int = 2) -> str:
    """A value and its 95% interval as they stand in tables: 1.49 (1.32–1.61)."""
    if figure is None or figure["value"] is None:
        return ""
    low, high = figure["low"], figure["high"]
    limits = "" if low is None or high is None else f" ({low:.{digits}f}–{high:.{digits}f})"
    return f"{figure['value']:.{digits}f}{limits}"


def _praise(best: Pair) -> str:
    if best.speedup is None:
        return f"the fastest is {best.name}: {best.tokens_per_second:.1f} tokens/s, without a baseline to compare with."
    times = f"{interval(best.speedup)} times plain decoding"
    if _side(best.speedup) < 0:
        return f"plain decoding is the fastest. The best pair is {best.name}: {times}."
    if _side(best.speedup) == 0:
        return (
            f"no pair is faster than plain decoding for certain. The best is {best.name}: {times}."
        )
    return f"the fastest is {best.name}: {times}."


def _equals(pairs: Sequence[Pair], best: Pair) -> str:
    """Whose distance to the fastest may be chance."""
    near = [
        pair
        for pair in pairs
        if pair is not best and pair.of_fastest and _side(pair.of_fastest) == 0
    ]
    return (
        f" As fast within the 95% interval: {', '.join(pair.name for pair in near)}."
        if near
        else ""
    )


def _side(ratio: Figure) -> int:
    """-1 for certainly below 1, 1 for above, 0 where the interval holds 1. Without an interval the value decides."""
    value, low, high = ratio["value"], ratio["low"], ratio["high"]
    assert value is not None
    low, high = (value if low is None else low), (value if high is None else high)
    return 1 if low > 1 else -1 if high < 1 else 0


def _listed(pairs: Sequence[Pair]) -> str:
    return ", ".join(f"{pair.name} {interval(pair.speedup)}".strip() for pair in pairs)


def _name(row: dict[str, Any], several: bool) -> str:
    """As `--drafter` and `--verifier` name it: rrs-wo@2x4."""
    name = row["verifier"] + (f"@{tree_name(row['tree'])}" if row["tree"] else "")
    return f"{short(row['drafter'])} with {name}" if several else name


def short(drafter: str | None) -> str:
    """The kind of a drafter, and the last part of its path."""
    kind, colon, value = (drafter or "").partition(":")
    return kind + colon + PurePath(value).name


def tree_name(tree: str | None) -> str:
    """A tree's file by its name alone."""
    return PurePath(tree).name if tree and tree.endswith(".json") else tree or ""
