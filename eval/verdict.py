"""The verdict below tables: the fastest pair at each temperature, and pairs that do not pay.

A bootstrap over questions does not see what a busy machine does to the clock. So plain decoding is
measured twice (A/A), and its ratio to itself gives the clock's noise: a pair is called faster or
slower only where its whole interval lies beyond 1 by more than that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from treespec.draft.drafters import DrafterSpec
from treespec.eval.bootstrap import Figure

FEW = 10  # with fewer questions a percentile interval is markedly too narrow
LEAST_TAU = 1.02  # below it drafts brought nothing, and a difference is the clock's
PAUSED = 0.1  # share of the cycles without drafts from which the verdict mentions it


@dataclass(frozen=True)
class MeasuredPair:
    """A verifier and tree at one temperature.

    speedup: over plain decoding; None: plain decoding was not measured. tau: tokens per cycle.
    of_fastest: the ratio of its tokens/s to those of the fastest lossless pair; None for that pair,
    or without a comparison. paused: share of its cycles in which `auto` drafted nothing.
    """

    name: str
    temperature: float
    tokens_per_second: float
    speedup: Figure | None
    tau: float
    lossless: bool = True
    of_fastest: Figure | None = None
    paused: float = 0.0


def sentences(
    pairs: Sequence[MeasuredPair], questions: int, noises: Mapping[float, float | None]
) -> list[str]:
    """The verdict, temperature by temperature.

    questions: how many were asked. noises: `noise_of` the A/A ratio by temperature; without one,
    nothing is called faster or slower.
    """
    lines = []
    for temperature in dict.fromkeys(pair.temperature for pair in pairs):
        # 1. What is faster or slower, or why that cannot be said.
        at = f"At temperature {temperature:g}"
        here = [pair for pair in pairs if pair.temperature == temperature]
        noise = noises.get(temperature)
        if questions < FEW:
            few = f"{questions} question{'s are' if questions > 1 else ' is'} too few"
            lines.append(f"{at} {few} to say what is faster or slower: ask {FEW} or more.")
        elif noise is None:
            unknown = "plain decoding was not measured twice, so the clock's noise is unknown"
            lines.append(f"{at} nothing is called faster or slower: {unknown}.")
        else:
            lines += [f"{at} {said}" for said in _compared(here, noise)]

        # 2. Where drafting paused.
        lines += [
            f"{at} {pair.name} drafted nothing in {pair.paused:.0%} of its cycles, as it expected no "
            "gain from a draft."
            for pair in here
            if pair.paused >= PAUSED
        ]
    return lines


def noise_of(again: Figure | None) -> float | None:
    """The clock's noise: how far the interval of an A/A ratio reaches from 1, as a share.

    None where it has no interval.
    """
    if again is None or again["low"] is None or again["high"] is None:
        return None
    return max(again["high"], 1 / again["low"]) - 1


def _compared(pairs: Sequence[MeasuredPair], noise: float) -> list[str]:
    """Pairs at one temperature beside plain decoding and beside the fastest lossless one."""
    # 1. The fastest lossless pair, its equals, and lossy pairs that are faster.
    sides = [(pair, _side(pair, noise)) for pair in pairs]
    lossless = [(pair, side) for pair, side in sides if pair.lossless]
    faster = [pair for pair, side in lossless if side == 1]
    best = max(
        (pair for pair, _ in lossless), key=lambda pair: pair.tokens_per_second, default=None
    )
    lines = []
    if best and best in faster:
        near = [
            pair.name for pair in pairs if pair.lossless and _beyond(pair.of_fastest, noise) == 0
        ]
        equals = f" As fast within interval and noise: {', '.join(near)}." if near else ""
        lines.append(f"the fastest is {_times(best)}{equals}")
    elif faster:
        lines.append(f"these are faster than plain decoding: {_listed(faster)}.")
    elif best and all(side == -1 for _, side in lossless):
        lines.append(f"plain decoding is the fastest. The best pair is {_times(best)}")
    lossy = [
        pair
        for pair, side in sides
        if not pair.lossless and side == _beyond(pair.of_fastest, noise) == 1
    ]
    if lossy:
        change = "these are faster, but change the distribution of the completion"
        lines.append(f"{change}: {_listed(lossy)}.")

    # 2. Pairs that do not pay, and those of which nothing can be said.
    if slower := [pair for pair, side in sides if side == -1]:
        lines.append(f"these are slower than plain decoding: {_listed(slower)}.")
    if unsure := [f"{_listed([p])}, {_why(p, noise)}" for p, side in sides if side == 0]:
        lines.append(f"these are neither faster nor slower for certain: {'; '.join(unsure)}.")
    return lines


def _side(pair: MeasuredPair, noise: float) -> int | None:
    """`_beyond` of the speedup; 0 where drafts brought nothing."""
    return 0 if pair.tau < LEAST_TAU else _beyond(pair.speedup, noise)


def _beyond(ratio: Figure | None, noise: float) -> int | None:
    """-1: below 1 by more than the noise; 1: above; 0: neither; None: no ratio.

    The whole interval counts; without an interval the value.
    """
    if ratio is None:
        return None
    value, low, high = ratio["value"], ratio["low"], ratio["high"]
    assert value is not None
    low = value if low is None else low
    high = value if high is None else high
    return 1 if low > 1 + noise else -1 if high * (1 + noise) < 1 else 0


def _why(pair: MeasuredPair, noise: float) -> str:
    """Why a pair is called neither faster nor slower."""
    if pair.tau < LEAST_TAU:
        return f"as drafts brought nothing (τ {pair.tau:.3f})"
    if _beyond(pair.speedup, 0.0) == 0:
        return "whose interval holds 1"
    return f"inside the clock's noise of ±{100 * noise:.1f} %"


def _times(pair: MeasuredPair) -> str:
    return f"{pair.name}: {interval(pair.speedup)} times plain decoding."


def _listed(pairs: Sequence[MeasuredPair]) -> str:
    return ", ".join(f"{pair.name} {interval(pair.speedup)}".strip() for pair in pairs)


def interval(figure: Figure | None, digits: int = 2) -> str:
    """A value and its 95 % interval as a cell of a table: 1.49 (1.32–1.61)."""
    if figure is None or figure["value"] is None:
        return ""
    low, high = figure["low"], figure["high"]
    limits = "" if low is None or high is None else f" ({low:.{digits}f}–{high:.{digits}f})"
    return f"{figure['value']:.{digits}f}{limits}"


def short(drafter: str | None) -> str:
    """The kind of a drafter, and the last part of its path."""
    return DrafterSpec.parse(drafter).short if drafter else ""


def tree_name(tree: str | None) -> str:
    """A tree as `--tree` names it; a file without its folder."""
    return PurePath(tree).name if tree and tree.endswith(".json") else tree or ""
