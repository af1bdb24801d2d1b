"""The verdict below tables: the fastest pair at each temperature, pairs that do not pay, right answers.

A bootstrap over questions does not see what a busy machine does to the clock. So plain decoding is
measured twice (A/A), and its ratio to itself gives the clock's noise: a pair is called faster or
slower only where its whole interval lies beyond 1 by more than that.
"""

from collections.abc import Sequence

from treespec.eval.figures import Row, Summary
from treespec.eval.intervals import FEW, Figure
from treespec.eval.report import percent, shown

LEAST_TAU = 1.02  # below it drafts brought nothing, and a difference is the clock's
PAUSED = 0.1  # share of the cycles without drafts from which the verdict mentions it


def verdict(summary: Summary) -> list[str]:
    """By batch size and temperature: what is fastest and what does not pay, peers, right answers."""
    rows = [row | {"name": name_of(row)} for row in summary["rows"]]
    noises = {(a["batch"], a["temperature"]): noise_of(a["speedup"]) for a in summary["again"]}
    lines: list[str] = []
    for at in sorted({(row["batch"], row["temperature"]) for row in rows}):
        here = [row for row in rows if (row["batch"], row["temperature"]) == at]
        timed = [row for row in here if row["overall"]["tokens_per_second"]["value"]]
        pairs = [row for row in timed if row["drafter"]]
        lines += sentences(pairs, summary["questions"], noises.get(at))
        if peers := [row for row in timed if row["peer"] and row["overall"]["speedup"]]:
            times = f"peers have this many times plain decoding's tokens/s: {listed(peers)}"
            lines.append(f"At temperature {at[1]:g} {times}.")
        lines += right_sentences(here)
    return list(dict.fromkeys(lines))


def name_of(row: Row) -> str:
    """A row as `--verifier` names it, with drafter and batch where there are several."""
    drafter, _, tree, _, batch = row["labels"]
    name = row["method"] + (f"@{tree}" if tree else "")
    return (
        (f"{drafter} with " if drafter else "")
        + name
        + (f" in batches of {batch}" if batch else "")
    )


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
    # 1. By the side of 1 that their speedups are on.
    of_side: dict[int, list[Row]] = {-1: [], 0: [], 1: []}
    unsure = []
    for row in pairs:
        side, why = side_of(row, noise)
        of_side[side].append(row)
        if not side:
            unsure.append(f"{listed([row])}, {why}")

    # 2. The fastest lossless pair and its equals.
    lossless, lines = [row for row in pairs if row["lossless"]], []
    faster = [row for row in of_side[1] if row["lossless"]]
    best = max(lossless, key=lambda row: row["overall"]["tokens_per_second"]["value"], default={})
    times = f"{listed([best], ': ')} times plain decoding." if best else ""
    if best in faster:
        near = [row for row in lossless if row is not best and not beyond(row["of_fastest"], noise)]
        names = ", ".join(row["name"] for row in near)
        equals = f" As fast within interval and noise: {names}." if near else ""
        lines.append(f"the fastest is {times}{equals}")
    elif faster:
        lines.append(f"these are faster than plain decoding: {listed(faster)}.")
    elif lossless and all(row in of_side[-1] for row in lossless):
        lines.append(f"plain decoding is the fastest. The best pair is {times}")

    # 3. Lossy pairs that are faster, pairs that do not pay, and those of which nothing can be said.
    lossy = [row for row in of_side[1] if not row["lossless"]]
    lossy = [row for row in lossy if beyond(row["of_fastest"], noise) == 1]
    for which, what in (
        (lossy, "these are faster, but change the distribution of the completion"),
        (of_side[-1], "these are slower than plain decoding"),
    ):
        if which:
            lines.append(f"{what}: {listed(which)}.")
    if unsure:
        lines.append(f"these are neither faster nor slower for certain: {'; '.join(unsure)}.")
    return lines


def side_of(row: Row, noise: float) -> tuple[int, str]:
    """`beyond` of the speedup, and why nothing can be said where it is 0."""
    speedup, tau = row["overall"]["speedup"], row["overall"]["acceptance_length"]["value"] or 1.0
    if tau < LEAST_TAU:
        return 0, f"as drafts brought nothing (τ {tau:.3f})"
    if not beyond(speedup, 0.0):
        return 0, "whose interval holds 1"
    return beyond(speedup, noise), f"inside the clock's noise of ±{100 * noise:.1f} %"


def beyond(ratio: Figure | None, noise: float) -> int:
    """-1: below 1 by more than the noise; 1: above; 0: neither.

    The whole interval counts; without an interval the value.
    """
    if ratio is None:
        return 0
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


def listed(rows: Sequence[Row], sign: str = " ") -> str:
    """Names and speedups."""
    return ", ".join(f"{row['name']}{sign}{shown(row['overall']['speedup'])}" for row in rows)


def right_sentences(rows: Sequence[Row]) -> list[str]:
    """What right answers say about losslessness. rows: of one temperature.

    Lossy pairs are left out: they may be right more or less often.
    """
    pairs = [row for row in rows if row["lossless"] and row["right"] and row["right"]["difference"]]
    if not pairs:
        return []
    apart, first = [], pairs[0]["right"]
    for row in pairs:
        difference = row["right"]["difference"]
        if difference["low"] > 0 or difference["high"] < 0:
            apart.append(f"{row['name']} {shown(percent(difference))}")
    line = "every pair's share of right answers is the baseline's within the 95% interval."
    if all(row["right"]["same"] == row["right"]["answers"] for row in pairs):
        line = (
            "every pair answers the very questions rightly that the baseline does: "
            f"{first['right']} of {first['answers']}."
        )
    elif apart:
        line = (
            f"the share of right answers is not the baseline's: {', '.join(apart)}. Chance does that "
            "to one lossless pair in twenty; `treespec certify` tells."
        )
    return [f"At temperature {pairs[0]['temperature']:g} {line}"]
