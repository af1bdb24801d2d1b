"""Lay out the drawings of a report: the bars in a table's cells, and charts of tables and plots as SVG.

Everything is drawn from the printed figures, so that a bar never shows what its number does not say.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from treespec.eval.intervals import Figure, list_numbers
from treespec.eval.report import Plot, Table, escape_cell, fill_template, round_figure

LINE_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#666666")
LINE_MARKS = (  # the marks of a line's points, as SVG paths around (0, 0)
    "M-4 0A4 4 0 1 0 4 0A4 4 0 1 0 -4 0Z",
    "M-4 -4H4V4H-4Z",
    "M0 -5L5 4H-5Z",
    "M0 -5L5 0L0 5L-5 0Z",
    "M0 5L5 -4H-5Z",
    "M-4 -4L4 4M-4 4L4 -4",
    "M0 -5V5M-5 0H5",
    "M-5 -2H5V2H-5Z",
)
LINE_DASHES = ("", "6 3", "2 3")
CHARACTER_WIDTH = 6.6  # of the charts' text, in pixels of their view box
TICK_COUNT = 5  # approximate number of an axis


class Scale(NamedTuple):
    """An axis: its ends, low < high."""

    low: float
    high: float

    def place(self, value: float) -> float:
        """Return where a value lies on the axis, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)

    def list_ticks(self) -> list[float]:
        """List round values on the axis."""
        step = 10 ** math.floor(math.log10((self.high - self.low) / TICK_COUNT))
        for factor in (1, 2, 5, 10):
            if (self.high - self.low) / (step * factor) <= TICK_COUNT:
                step *= factor
                break
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(number * step, 10) for number in range(first, last + 1)]


@dataclass(frozen=True)
class Bar:
    """A figure's bar, in percent of its cell's width.

    Attributes:
        start: left end.
        width: 0 for a figure that is printed as 0.
        low: left end of the interval's line; None without an interval.
        high: its right end.
        reference: where the dashed line stands; None: no line.
    """

    start: float
    width: float
    low: float | None
    high: float | None
    reference: float | None


def list_figures(table: Table, column: str) -> list[Figure | None]:
    """List the figures of a column as they are printed; None where a cell has none."""
    figures: list[Figure | None] = []
    for row in table.rows:
        cell = row.get(column)
        if cell is None or isinstance(cell, str) or cell["value"] is None:
            figures.append(None)
        else:
            figures.append(round_figure(cell))
    return figures


def list_figure_columns(table: Table) -> list[str]:
    """List the columns that have a figure."""
    names = [name for name in table.columns if name not in table.labels]
    return [name for name in names if any(list_figures(table, name))]


def fit_scale(table: Table, column: str) -> Scale | None:
    """Fit the axis of a column's bars: from 0, or below, to the largest end. None if all figures are 0."""
    values = [0.0]
    if table.reference is not None:
        values.append(table.reference)
    for figure in list_figures(table, column):
        if figure is not None:
            values += list_numbers(figure)
    if min(values) == max(values):
        return None
    return Scale(min(values), max(values))


def build_bars(table: Table, column: str) -> list[Bar | None]:
    """Lay out the bar of each row in a column; None without a figure, or if nothing can be drawn."""
    scale = fit_scale(table, column)
    figures = list_figures(table, column)
    if scale is None:
        return [None for _ in figures]
    bars: list[Bar | None] = []
    for figure in figures:
        if figure is None:
            bars.append(None)
        else:
            bars.append(build_bar(figure, scale, table.reference))
    return bars


def build_bar(figure: Figure, scale: Scale, reference: float | None) -> Bar:
    """Lay out the bar of one figure from 0 to its value."""

    def place(value: float | None) -> float | None:
        if value is None:
            return None
        return round(100 * scale.place(value), 2)

    start, end = sorted([place(0.0) or 0.0, place(figure["value"]) or 0.0])
    return Bar(
        start=start,
        width=round(end - start, 2),
        low=place(figure["low"]),
        high=place(figure["high"]),
        reference=place(reference),
    )


def list_legend(table: Table) -> list[tuple[str, str]]:
    """List the kinds of marks that a table's cells have, each with what it means; [] if nothing is drawn."""
    bars = []
    for column in list_figure_columns(table):
        bars += [bar for bar in build_bars(table, column) if bar is not None]
    legend = []
    if any(bar.width for bar in bars):
        legend.append(("bar", "the number above it; each column has its own scale, from 0"))
    if any(bar.low != bar.high for bar in bars):
        legend.append(("whisker", "95 % interval"))
    if any(bar.reference is not None for bar in bars):
        legend.append(("one", f"{table.reference:g}: {table.reference_name}"))
    return legend


def draw_table(table: Table) -> str:
    """Draw a table's figures as SVG: a panel of bars for each column, a line for each row; "" without figures."""
    names = [name_row(table, number) for number in range(len(table.rows))]
    panels = []
    for column in list_figure_columns(table):
        texts = table.columns[column][1:]
        bars = build_bars(table, column)
        panels.append({"name": column, "cells": list(zip(bars, texts, strict=True))})
    if not panels:
        return ""
    label_width = 12 + CHARACTER_WIDTH * max(map(len, names))
    return fill_template(
        "table.svg",
        table=table,
        names=names,
        panels=panels,
        label_width=label_width,
        legend=list_legend(table),
    )


def name_row(table: Table, number: int) -> str:
    """Name a row of a table by its labels, as "topk · 2x2 · T=0": a column of one letter needs its name."""
    words = []
    for name in table.labels:
        label = escape_cell(table.rows[number].get(name))
        if label and len(name) == 1:
            label = f"{name}={label}"
        if label:
            words.append(label)
    return " · ".join(words)


def draw_plot(plot: Plot) -> str:
    """Draw a plot as SVG: its lines with their points and intervals, both axes with titles, and a legend."""
    figures: list[Figure] = []
    positions: list[float] = []
    for points in plot.lines.values():
        for position, figure in points:
            positions.append(position)
            figures.append(round_figure(figure))
    values = [number for figure in figures for number in list_numbers(figure)]
    x_scale = pad_scale(positions)
    y_scale = pad_scale(values)
    lines = []
    for number, (name, points) in enumerate(plot.lines.items()):
        shift = number - (len(plot.lines) - 1) / 2
        lines.append({**build_line(name, number, points, x_scale, y_scale), "shift": shift})
    columns = max(1, int(600 // (44 + CHARACTER_WIDTH * max(map(len, plot.lines)))))
    return fill_template(
        "plot.svg",
        plot=plot,
        lines=lines,
        x_ticks=[(x_scale.place(tick), f"{tick:g}") for tick in x_scale.list_ticks()],
        y_ticks=[(y_scale.place(tick), f"{tick:g}") for tick in y_scale.list_ticks()],
        legend_columns=columns,
        has_intervals=any(figure["low"] is not None for figure in figures),
    )


def pad_scale(values: Sequence[float]) -> Scale:
    """Fit an axis around values, with a margin."""
    margin = 0.05 * (max(values) - min(values))
    if margin == 0:
        margin = 0.05 * abs(values[0]) or 1.0
    return Scale(min(values) - margin, max(values) + margin)


def build_line(
    name: str, number: int, points: Sequence[tuple[float, Figure]], x_scale: Scale, y_scale: Scale
) -> Mapping[str, Any]:
    """Lay out a line of a plot: its look, which no other line shares, and its points from 0 to 1 on both axes."""
    dots = []
    for position, raw_figure in points:
        figure = round_figure(raw_figure)
        if figure["value"] is None:
            continue
        ends = [figure[end] for end in ("low", "high")]
        interval = [y_scale.place(end) for end in ends if end is not None]
        dot = {
            "x": x_scale.place(position),
            "y": y_scale.place(figure["value"]),
            "interval": interval,
            "text": f"{name}: {escape_cell(figure)}",
        }
        dots.append(dot)
    return {
        "name": name,
        "color": LINE_COLORS[number % len(LINE_COLORS)],
        "mark": LINE_MARKS[number % len(LINE_MARKS)],
        "dash": LINE_DASHES[number // len(LINE_COLORS) % len(LINE_DASHES)],
        "dots": dots,
    }
