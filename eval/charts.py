"""Charts of a page: rows of bars, each a label, an SVG of percentages and a value."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from treespec.eval.bootstrap import Figure
from treespec.eval.common import STAGE_NAMES, STAGES
from treespec.eval.notes import compares, name_of
from treespec.eval.summary import Row, Summary
from treespec.eval.verdict import interval

DEPTHS = 10  # of which the stack of τ has parts; the last one takes the deeper ones too

Style = Literal["plain", "ours", "lossy", "peer"]


@dataclass(frozen=True)
class Bar:
    """parts: lengths side by side, in the order of the chart's legend; below 0 counts as 0.

    low, high: the 95 % interval. marker: a second figure on the same axis, drawn as a diamond.
    """

    label: str
    parts: Sequence[float]
    shown: str
    low: float | None = None
    high: float | None = None
    style: Style = "ours"
    marker: float | None = None

    @property
    def lengths(self) -> list[float]:
        return [max(part, 0.0) for part in self.parts]

    @property
    def starts(self) -> list[float]:
        return [sum(self.lengths[:part]) for part in range(len(self.parts))]

    @property
    def farthest(self) -> float:
        return max(sum(self.lengths), self.high or 0.0, self.marker or 0.0)


def bar_of(label: str, figure: Figure, unit: str = "") -> Bar:
    """A figure with its interval."""
    shown = interval(figure) + unit
    return Bar(label, [value_of(figure)], shown, figure["low"], figure["high"])


def value_of(figure: Figure | None) -> float:
    """Its value; 0 where there is none."""
    return (figure and figure["value"]) or 0.0


@dataclass(frozen=True)
class Group:
    """Rows under a heading, such as those of one temperature."""

    heading: str
    rows: Sequence[Bar]


@dataclass(frozen=True)
class Chart:
    """text: how to read it. legend: the names of a bar's parts. reference: a line at this value.

    marker: what the diamonds are, "" where there are none. shade: of the parts, a colour of
    its own for each (part), or grey and then one that pales (step).
    """

    title: str
    text: str
    groups: Sequence[Group]
    legend: Sequence[str] = ()
    reference: float | None = None
    marker: str = ""
    shade: Literal["part", "step"] = "part"

    @property
    def scale(self) -> float:
        """Percent of the width for each unit; 2 % stay free for the ends of intervals."""
        farthest = [row.farthest for group in self.groups for row in group.rows]
        return 98 / max(*farthest, self.reference or 0.0, 1e-9)


def charts_of(summary: Summary) -> list[Chart]:
    """The charts of an evaluation; those of times only where one process measured."""
    rows = summary["rows"]
    pairs = [row for row in rows if row["drafter"]]
    charts = [speed(rows)] if summary["timed"] else []
    charts += [lengths(pairs)]
    charts += [costs([row for row in rows if not row["peer"]])] if summary["timed"] else []
    charts += [bounds(pairs)] if summary["timed"] and compares(summary) else []
    charts += [forwards(summary)] if summary["forwards"] else []
    return [*charts, categories(pairs)]


def by_temperature(rows: Sequence[Row], draw: Callable[[Row], Bar]) -> list[Group]:
    temperatures = dict.fromkeys(row["temperature"] for row in rows)
    return [
        Group(f"temperature {t:g}", [draw(row) for row in rows if row["temperature"] == t])
        for t in temperatures
    ]


def speed(rows: Sequence[Row]) -> Chart:
    """Speedups, or tokens/s where there is no baseline."""
    compared = any(row["overall"]["speedup"] for row in rows)

    def bar(row: Row) -> Bar:
        one: Figure = {"value": 1.0, "low": None, "high": None}  # the baseline's speedup
        figure: Figure = row["overall"]["speedup" if compared else "tokens_per_second"] or one
        style: Style = "peer" if row["peer"] else "ours" if row["drafter"] else "plain"
        style = style if row["lossless"] else "lossy"
        name, shown = name_of(row, rows), interval(figure, 2 if compared else 1)
        return replace(bar_of(name, figure), shown=shown, style=style)

    return Chart(
        title="How much faster" if compared else "Tokens a second",
        text="Tokens a second over those of plain decoding, one token at a time through the same "
        "target; prompts included. Violet bars are other programs. The whisker is the 95 % interval "
        "over questions; a whisker that crosses the dashed line at 1, or ends within the clock's noise "
        "of it, leaves open whether drafting pays."
        if compared
        else "Prompts included; the whisker is the 95 % interval over questions.",
        groups=by_temperature(rows, bar),
        reference=1.0 if compared else None,
    )


def lengths(pairs: Sequence[Row]) -> Chart:
    """τ as the sum of what each depth adds to it."""
    # 1. The depths that get a part of their own.
    deepest = max((len(row["overall"]["accepted_by_depth"]) for row in pairs), default=0)
    shown = min(deepest, DEPTHS)

    # 2. A row's parts: the target's own token, then one part a depth.
    def stack(row: Row) -> Bar:
        overall = row["overall"]
        tau = overall["acceptance_length"]
        shares = [count / overall["cycles"] for count in overall["accepted_by_depth"]]
        by_depth = [*shares[: shown - 1], sum(shares[shown - 1 :])] if shown else []
        by_depth += [0.0] * (shown - len(by_depth))
        parts = [value_of(tau) - sum(by_depth), *by_depth]
        return Bar(name_of(row, pairs), parts, interval(tau), tau["low"], tau["high"])

    # 3. The chart.
    names = [f"depth {depth}" for depth in range(1, shown + 1)]
    if deepest > shown:
        names[-1] += " and deeper"
    return Chart(
        title="What the acceptance length τ is made of",
        text="τ is the number of tokens that a forward of the target brings: its own one, and 1 more "
        "for each depth of the tree at which a node is accepted. A part is as long as the share of "
        "cycles that accept this depth, so each is shorter than the one before. A wide first part "
        "is a good first guess; parts that shrink slowly are a draft model that stays right.",
        groups=by_temperature(pairs, stack),
        legend=["the target's own", *names],
        shade="step",
    )


def costs(rows: Sequence[Row]) -> Chart:
    """A cycle's stages, in the time of one-token decoding's cycles where that was measured."""
    # 1. The unit: a cycle of the baseline at each temperature and batch size.
    baselines = {
        (row["temperature"], row["batch"]): sum(row["overall"]["cycle_ms"].values())
        for row in rows
        if not row["drafter"]
    }
    compared = bool(baselines)

    # 2. A row's stages in that unit.
    def stack(row: Row) -> Bar:
        ms, tau = row["overall"]["cycle_ms"], value_of(row["overall"]["acceptance_length"])
        unit = baselines.get((row["temperature"], row["batch"]), 1.0)
        parts = [ms[stage] / unit for stage in STAGES]
        name, cost = name_of(row, rows), sum(parts)
        if not compared:
            return Bar(name, parts, f"{cost:.1f} ms")
        return Bar(name, parts, f"{tau:.2f} / {cost:.2f} = {tau / cost:.2f}", marker=tau)

    # 3. The chart.
    return Chart(
        title="What a cycle costs and what it brings",
        text="The bar is the time of a cycle by stage, in cycles of plain decoding; the diamond is "
        "the tokens that it brings, τ. Drafting pays where the diamond lies to the right of the bar's "
        "end, and the quotient is the speedup without prompts."
        if compared
        else "The time of a cycle by stage, in ms.",
        groups=by_temperature(rows, stack),
        legend=[STAGE_NAMES[stage] for stage in STAGES],
        reference=1.0 if compared else None,
        marker="τ" if compared else "",
    )


def bounds(pairs: Sequence[Row]) -> Chart:
    """Speedups next to what the forwards alone would give."""

    def bar(row: Row) -> Bar:
        figure, most = row["overall"]["decoding_speedup"], value_of(row["overall"]["bound"])
        shown = f"{value_of(figure):.2f} of {most:.2f}"
        return Bar(name_of(row, pairs), [value_of(figure)], shown, marker=most)

    return Chart(
        title="The speedup and its bound",
        text="Without prompts. The bound is τ · T(1) / (T(N) + T_draft): what would be left if a cycle "
        "were its forwards alone. From the bar to the diamond is what drafting, verifying and keeping "
        "cost besides; beyond the diamond only a better tree or a cheaper forward helps.",
        groups=by_temperature(pairs, bar),
        reference=1.0,
        marker="bound",
    )


def forwards(summary: Summary) -> Chart:
    """The target's forward by the number of nodes, a group a context."""
    groups: dict[int, list[Bar]] = {}
    for one in summary["forwards"]:
        if one["what"] == "target":
            name = f"{one['nodes']} node{'s' if one['nodes'] > 1 else ''}"
            groups.setdefault(one["context"], []).append(bar_of(name, one["ms"], " ms"))
    return Chart(
        title="What a node costs the target",
        text="The time of one forward by the size of its tree. While the bars are equally long, nodes "
        "are free and a larger tree pays; where they grow with the nodes, each node has to earn its time.",
        groups=[Group(f"context {context}", bars) for context, bars in groups.items()],
    )


def categories(pairs: Sequence[Row]) -> Chart:
    """τ of each pair by category."""
    return Chart(
        title="τ by category",
        text="How far the draft model follows depends on the text. Speedups are in the tables.",
        groups=[
            Group(
                f"{name_of(row, pairs)}, temperature {row['temperature']:g}",
                [bar_of(name, own["acceptance_length"]) for name, own in row["categories"].items()],
            )
            for row in pairs
        ],
    )
