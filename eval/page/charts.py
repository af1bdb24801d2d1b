"""Charts of a page: rows of bars, each a label, an SVG of percentages and a value."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from treespec.eval.bootstrap import Figure

Style = Literal["plain", "ours", "lossy", "peer"]


@dataclass(frozen=True)
class Bar:
    """low, high: the 95 % interval. marker: a second figure on the same axis, drawn as a diamond."""

    label: str
    value: float
    shown: str
    low: float | None = None
    high: float | None = None
    style: Style = "ours"
    marker: float | None = None

    @property
    def farthest(self) -> float:
        return max(self.value, self.high or 0.0, self.marker or 0.0)


def bar_of(
    label: str,
    figure: Figure | None,
    shown: str,
    style: Style = "ours",
    marker: float | None = None,
) -> Bar:
    """A bar of a figure with its interval."""
    low, high = (figure["low"], figure["high"]) if figure else (None, None)
    return Bar(label, value_of(figure), shown, low, high, style, marker)


def value_of(figure: Figure | None) -> float:
    """Its value; 0 where there is none."""
    return (figure and figure["value"]) or 0.0


@dataclass(frozen=True)
class Stack:
    """parts: lengths, in the order of the chart's legend; below 0 counts as 0."""

    label: str
    parts: Sequence[float]
    shown: str
    low: float | None = None
    high: float | None = None
    marker: float | None = None

    @property
    def farthest(self) -> float:
        return max(sum(self.lengths), self.high or 0.0, self.marker or 0.0)

    @property
    def lengths(self) -> list[float]:
        return [max(part, 0.0) for part in self.parts]

    @property
    def starts(self) -> list[float]:
        return [sum(self.lengths[:place]) for place in range(len(self.parts))]


@dataclass(frozen=True)
class Group:
    """Rows under a heading, such as those of one temperature."""

    heading: str
    rows: Sequence[Bar | Stack]


@dataclass(frozen=True)
class Chart:
    """text: how to read it. legend: the names of a stack's parts. reference: a line at this value.

    marker: what the diamonds are, "" where there are none. shade: of a stack's parts, a colour of
    its own for each (part), or grey and then one that pales (step).
    """

    kind: ClassVar[str] = "bars"

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


@dataclass(frozen=True)
class Grid:
    """A number a cell, with a bar behind it. None: no figure."""

    kind: ClassVar[str] = "grid"

    title: str
    text: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float | None]]]
    largest: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        found = [value for _, values in self.rows for value in values if value is not None]
        object.__setattr__(self, "largest", max(found, default=1.0) or 1.0)
