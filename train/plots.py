"""Plots as inline SVG, for the report of a run: lines over steps, and points with their intervals."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

PLOT_WIDTH = 460
PLOT_HEIGHT = 260
LEFT_MARGIN = 56  # between the drawing's border and the axes
RIGHT_MARGIN = 12
TOP_MARGIN = 12
BOTTOM_MARGIN = 36
SERIES_COLOURS = ("#2563a8", "#c2571a", "#2e7d4f", "#8a4fa3", "#8c6d1f", "#555555")
MAX_TICKS = 5
TICK_STEPS = (1, 2, 5, 10)
LOG_RANGE = 20  # largest over smallest value from which on an axis is logarithmic


class Point(NamedTuple):
    """A point of a plot.

    Attributes:
        x, y: where it is.
        margin: half of the interval around y; 0: none is drawn.
    """

    x: float
    y: float
    margin: float = 0.0


@dataclass(frozen=True)
class Series:
    """The points of one name.

    Attributes:
        name: for the legend.
        points: in the order of x.
        colour: its number in `SERIES_COLOURS`.
        is_line: whether a line joins the points; else each is a dot.
    """

    name: str
    points: Sequence[Point]
    colour: int = 0
    is_line: bool = True


@dataclass(frozen=True)
class Axis:
    """The range of an axis, and where its values lie in the drawing.

    Attributes:
        low, high: the smallest and the largest value.
        start, end: their places.
        is_log: whether equal ratios are equally far apart.
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """Compute where a value lies."""
        share = (value - self.low) / (self.high - self.low)
        if self.is_log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def list_ticks(self) -> list[float]:
        """List round values on the axis."""
        if self.is_log:
            first = math.ceil(math.log10(self.low))
            last = math.floor(math.log10(self.high))
            if last < first:
                return [self.low, self.high]
            return [10.0**power for power in range(first, last + 1)]
        step = choose_tick_step(self.high - self.low)
        ticks = []
        tick = math.ceil(self.low / step)
        while tick * step <= self.high:
            ticks.append(tick * step)
            tick += 1
        return ticks


def choose_tick_step(span: float) -> float:
    """Choose a round distance of ticks: 1, 2 or 5 times a power of ten."""
    rough = span / MAX_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    for factor in TICK_STEPS:
        if factor * power >= rough:
            return factor * power
    return 10 * power


def build_axis(values: Sequence[float], start: float, end: float, may_log: bool = False) -> Axis:
    """Build an axis that holds all values. may_log: whether it is logarithmic for values over a wide range."""
    low = min(values)
    high = max(values)
    if low == high:
        room = abs(low) / 10 + 1e-9
        low -= room
        high += room
    is_log = may_log and low > 0 and high / low > LOG_RANGE
    return Axis(low, high, start, end, is_log)


def draw_figure(title: str, x_name: str, series: Sequence[Series], may_log: bool = False) -> str:
    """Draw a plot as a figure of HTML with inline SVG; "" without points.

    Args:
        title: what the plot shows.
        x_name: what the horizontal axis counts.
        series: the points by name.
        may_log: whether the vertical axis may be logarithmic.
    """
    # 1. The axes.
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    heights = [point.y - point.margin for point in points]
    heights += [point.y + point.margin for point in points]
    x_axis = build_axis([point.x for point in points], LEFT_MARGIN, PLOT_WIDTH - RIGHT_MARGIN)
    y_axis = build_axis(heights, PLOT_HEIGHT - BOTTOM_MARGIN, TOP_MARGIN, may_log)
    parts = []
    for tick in x_axis.list_ticks():
        x = x_axis.place(tick)
        parts.append(f'<text x="{x:.1f}" y="{PLOT_HEIGHT - BOTTOM_MARGIN + 16}">{tick:,.6g}</text>')
    for tick in y_axis.list_ticks():
        y = y_axis.place(tick)
        parts.append(f'<path class="grid" d="M{LEFT_MARGIN} {y:.1f}H{PLOT_WIDTH - RIGHT_MARGIN}"/>')
        parts.append(f'<text class="side" x="{LEFT_MARGIN - 6}" y="{y + 4:.1f}">{tick:,.4g}</text>')
    parts.append(
        f'<text x="{(LEFT_MARGIN + PLOT_WIDTH) / 2}" y="{PLOT_HEIGHT - 4}">{html.escape(x_name)}</text>'
    )

    # 2. The points, and the names below the plot.
    names = []
    for one in series:
        colour = SERIES_COLOURS[one.colour % len(SERIES_COLOURS)]
        parts += draw_series(one, colour, x_axis, y_axis)
        names.append(f'<span style="color:{colour}">{html.escape(one.name)}</span>')
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {PLOT_WIDTH} {PLOT_HEIGHT}" role="img" aria-label="{html.escape(title)}">'
        f"{''.join(parts)}</svg><p>{' · '.join(names)}</p></figure>"
    )


def draw_series(series: Series, colour: str, x_axis: Axis, y_axis: Axis) -> list[str]:
    """Draw the points of one name: a line or dots, with their intervals."""
    places = [(x_axis.place(point.x), y_axis.place(point.y)) for point in series.points]
    shapes = []
    if series.is_line and len(places) > 1:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        shapes.append(f'<path class="line" stroke="{colour}" d="M{path}"/>')
    else:
        shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    for point, (x, _) in zip(series.points, places, strict=True):
        if point.margin:
            high = y_axis.place(point.y + point.margin)
            low = y_axis.place(point.y - point.margin)
            shapes.append(
                f'<path class="bar" stroke="{colour}" d="M{x:.1f} {high:.1f}V{low:.1f}"/>'
            )
    return shapes
