"""The verdict below tables: the fastest pair at each temperature, pairs that do not pay, right answers.

A bootstrap over questions does not see what a busy machine does to the clock. So plain decoding is
measured twice (A/A), and its ratio to itself gives the clock's noise: a pair is called faster or
slower only where its whole interval lies beyond 1 by more than that.
"""

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from treespec.draft.drafters import DrafterSpec
from treespec.eval.figures import FEW, Row, Summary
from treespec.eval.intervals import Figure
from treespec.eval.report import percent, shown

LEAST_TAU = 1.02  # below it drafts brought nothing, and a difference is the clock's
PAUSED = 0.1  # share of the cycles without drafts from which the verdict mentions it


def verdict(summary: Summary) -> list[str]:
    """By batch size and temperature: what is fastest and what does not pay, peers, right answers."""
    rows = [row | {"name": name_of(row, summary["rows"])} for row in summary["rows"]]
    noises = {(a["batch"], a["temperature"]): noise_of(a["speedup"]) for a in summary["again"]}
    lines: list[str] = []
    for at in sorted({(row["batch"], row["temperature"]) for row in rows}):
        here = [row for row in rows if (row["batch"], row["temperature"]) == at]
        timed = [row for row in here if row["overall"]["tokens_per_second"]["value"]]
        pairs = [row for row in timed if row["drafter"]]
        lines += sentences(pairs, summary["questions"], noises.get(at))
        if peers := [row for row in timed if row["peer"] and row["overall"]["speedup"]]:
            told = f"peers have this many times plain decoding's tokens/s: {listed(peers)}"
            lines.append(f"At temperature {at[1]:g} {told}.")
        lines += right_sentences(here)
    return list(dict.fromkeys(lines))


def name_of(row: Row, rows: Sequence[Row]) -> str:
    """A row as `--verifier` names it, with drafter and batch where there are several."""
    name = row["method"] + (f"@{tree_name(row['tree'])}" if row["tree"] else "")
    if row["drafter"] and several(rows):
        name = f"{short(row['drafter'])} with {name}"
    batch = batch_of(row, rows)
    return f"{name} in batches of {batch}" if batch else name


def batch_of(row: Any, rows: Sequence[Row]) -> str:
    return str(row["batch"]) if len({other["batch"] for other in rows}) > 1 else ""


def several(rows: Sequence[Row]) -> bool:
    """Whether there are several drafters."""
    return len({row["drafter"] for row in rows} - {None}) > 1


def short(drafter: str | None) -> str:
    """The kind of a drafter, and the last part of its path."""
    return DrafterSpec.parse(drafter).short if drafter else ""


def tree_name(tree: str | None) -> str:
    """A tree as `--tree` names it; a file without its folder."""
    return PurePath(tree).name if tree and tree.endswith(".json") else tree or ""


def sentences(pairs: Sequence[Row], questions: int, noise: float | None) -> list[str]:
    """What is faster or slower of the rows of one temperature and batch size, or why nobody can say.

    noise: the clock's; without it nothing is called faster or slower.
    """
    # 1. Faster, slower or neither.
    if not pairs:
        return []
    if questions < FEW:
        few = f"{questions} question{'s are' if questions > 1 else ' is'} too few"
        lines = [f"{few} to say what is faster or slower: ask {FEW} or more."]
    elif noise is None:
        unknown = "plain decoding was not measured twice, so the clock's noise is unknown"
        lines = [f"nothing is called faster or slower: {unknown}."]
    else:
        lines = compared(pairs, noise)

    # 2. Where drafting paused.
    lines += [
        f"{row['name']} drafted nothing in {row['overall']['undrafted']:.0%} of its cycles, as it "
        "expected no gain from a draft."
        for row in pairs
        if row["method"] == "auto" and row["overall"]["undrafted"] >= PAUSED
    ]
    return [f"At temperature {pairs[0]['temperature']:g} {line}" for line in lines]


def compared(pairs: Sequence[Row], noise: float) -> list[str]:
    """Pairs beside plain decoding and beside the fastest lossless one."""
    # 1. The fastest lossless pair and its equals.
    side = {row["name"]: side_of(row, noise) for row in pairs}
    lossless = [row for row in pairs if row["lossless"]]
    faster = [row for row in lossless if side[row["name"]] == 1]
    best = max(lossless, key=lambda row: row["overall"]["tokens_per_second"]["value"], default=None)
    lines = []
    if best and best in faster:
        near = [row["name"] for row in lossless if beyond(row["of_fastest"], noise) == 0]
        equals = f" As fast within interval and noise: {', '.join(near)}." if near else ""
        lines.append(f"the fastest is {times(best)}{equals}")
    elif faster:
        lines.append(f"these are faster than plain decoding: {listed(faster)}.")
    elif best and all(side[row["name"]] == -1 for row in lossless):
        lines.append(f"plain decoding is the fastest. The best pair is {times(best)}")

    # 2. Lossy pairs that are faster, pairs that do not pay, and those of which nothing can be said.
    lossy = [
        row
        for row in pairs
        if not row["lossless"] and side[row["name"]] == beyond(row["of_fastest"], noise) == 1
    ]
    if lossy:
        change = "these are faster, but change the distribution of the completion"
        lines.append(f"{change}: {listed(lossy)}.")
    if slower := [row for row in pairs if side[row["name"]] == -1]:
        lines.append(f"these are slower than plain decoding: {listed(slower)}.")
    unsure = [f"{listed([row])}, {why(row, noise)}" for row in pairs if side[row["name"]] == 0]
    if unsure:
        lines.append(f"these are neither faster nor slower for certain: {'; '.join(unsure)}.")
    return lines


def tau_of(row: Row) -> float:
    return row["overall"]["acceptance_length"]["value"] or 1.0


def side_of(row: Row, noise: float) -> int | None:
    """`beyond` of the speedup; 0 where drafts brought nothing."""
    return 0 if tau_of(row) < LEAST_TAU else beyond(row["overall"]["speedup"], noise)


def beyond(ratio: Figure | None, noise: float) -> int | None:
    """-1: below 1 by more than the noise; 1: above; 0: neither; None: no ratio.

    The whole interval counts; without an interval the value.
    """
    if ratio is None:
        return None
    ends = [ratio["value"] if end is None else end for end in (ratio["low"], ratio["high"])]
    low, high = (end or 0.0 for end in ends)
    return 1 if low > 1 + noise else -1 if high * (1 + noise) < 1 else 0


def noise_of(again: Figure | None) -> float | None:
    """The clock's noise: how far the interval of an A/A ratio reaches from 1, as a share.

    None where it has no interval.
    """
    if again is None or again["low"] is None or again["high"] is None:
        return None
    return max(again["high"], 1 / again["low"]) - 1


def why(row: Row, noise: float) -> str:
    """Why a pair is called neither faster nor slower."""
    if tau_of(row) < LEAST_TAU:
        return f"as drafts brought nothing (τ {tau_of(row):.3f})"
    if beyond(row["overall"]["speedup"], 0.0) == 0:
        return "whose interval holds 1"
    return f"inside the clock's noise of ±{100 * noise:.1f} %"


def times(row: Row) -> str:
    return f"{row['name']}: {shown(row['overall']['speedup'])} times plain decoding."


def listed(rows: Sequence[Row]) -> str:
    return ", ".join(f"{row['name']} {shown(row['overall']['speedup'])}".strip() for row in rows)


def right_sentences(rows: Sequence[Row]) -> list[str]:
    """What right answers say about losslessness. rows: of one temperature.

    Lossy pairs are left out: they may be right more or less often.
    """
    pairs = [row for row in rows if row["lossless"] and row["right"] and row["right"]["difference"]]
    if not pairs:
        return []
    rights = [row["right"] for row in pairs]
    apart = [
        f"{row['name']} {shown(percent(right['difference']))}"
        for row, right in zip(pairs, rights, strict=True)
        if right["difference"]["low"] > 0 or right["difference"]["high"] < 0
    ]
    told = "every pair's share of right answers is the baseline's within the 95% interval."
    if all(right["same"] == right["answers"] for right in rights):
        told = (
            "every pair answers the very questions rightly that the baseline does: "
            f"{rights[0]['right']} of {rights[0]['answers']}."
        )
    elif apart:
        told = (
            f"the share of right answers is not the baseline's: {', '.join(apart)}. Chance does that "
            "to one lossless pair in twenty; `treespec certify` tells."
        )
    return [f"At temperature {pairs[0]['temperature']:g} {told}"]
