"""The lab's rates as tables, notes and a verdict.

The layout is that of Table 1 of Hu et al. 2025: a line per method, with α* below the methods that
draw in its way, and a column per temperature and number of draws. Given distributions have a line per distribution
and a column per method.
"""

import math
from collections.abc import Sequence
from typing import Any

from treespec.eval.intervals import Figure, Z
from treespec.eval.report import Cell, Report, Table, percent

Mean = dict[str, float | None]  # `value`, and its standard `error`: None where one group gives none
Row = dict[str, Any]  # one method at one combination, as `rows_of` makes it
KINDS = {  # of figures in a row, by what their tables are called
    "rate": "Acceptance rate α in %",
    "gap": "Below α* of its own draws, in points",
}
SHORT = {"temperature": "T", "draws": "K"}


def report_of(result: dict[str, Any]) -> Report:
    """What OUT/acceptance.md, OUT/acceptance.html and the terminal show."""
    tables = [table_of(rows, kind) for rows in result["sweeps"] for kind in KINDS]
    lines = [line for rows in result["sweeps"] for line in verdict(rows)]
    return Report(tables, notes(result), lines)


def table_of(rows: Sequence[Row], kind: str) -> Table:
    """One kind of figures of a sweep."""
    by_pair = set(rows[0]["at"]) > {"temperature", "draft", "draws"}
    lines: dict[str, dict[str, Cell]] = {}
    for row in in_order(rows):
        method = f"α* {row['method']}" if row["optimum"] else row["method"]
        line, column = (place_of(row), method) if by_pair else (method, place_of(row))
        if row[kind] is not None:
            lines.setdefault(line, {"": line})[column] = figure(row[kind])
    return Table(KINDS[kind], [""], [*lines.values()])


def figure(mean: Mean) -> Figure | None:
    """A mean in percent with its 95 % interval."""
    if mean["value"] is None:
        return None
    value, error = mean["value"], mean["error"]
    low, high = (None, None) if error is None else (value - Z * error, value + Z * error)
    return percent({"value": value, "low": low, "high": high})


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Rows by how they draw, α* after its schemes; last the schemes whose α* is not known."""
    kinds = list(dict.fromkeys(row["drawn"] for row in rows if row["drawn"]))
    return sorted(rows, key=lambda row: kinds.index(row["drawn"]) if row["drawn"] else len(kinds))


def place_of(row: Row) -> str:
    """Where a row was measured: T=0.6 K=2."""
    at = {SHORT.get(name, name): x for name, x in row["at"].items() if x != "same"}
    shown = {name: f"{x:.3g}" if isinstance(x, float) else str(x) for name, x in at.items()}
    return " ".join(f"{name}={x}" for name, x in shown.items())


def verdict(rows: Sequence[Row]) -> list[str]:
    """The methods that accept most, and where. It says nothing about the time a method takes.

    A sampled rate counts as no more than the α* of its draws, which bounds the true one, and as
    equal to rates within twice its sampling error. Nothing is said where all are equal.
    """
    best: dict[tuple[str, ...], list[str]] = {}
    for place in dict.fromkeys(map(place_of, rows)):
        here = [row for row in rows if place_of(row) == place]
        optima = {row["drawn"]: row["rate"]["value"] for row in here if row["optimum"]}
        rates = {}
        for row in here:
            if not row["optimum"]:
                rate = min(row["rate"]["value"], optima.get(row["drawn"], 1.0))
                rates[row["method"]] = rate, row["noise"] or 0.0
        most, error = max(rates.values(), default=(0.0, 0.0))
        methods = tuple(
            method
            for method, (rate, noise) in rates.items()
            if most - rate <= max(0.0005, 2 * math.hypot(error, noise))
        )
        if len(methods) < len(rates):
            best.setdefault(methods, []).append(f"{place} ({most:.1%})")
    return [f"Most is accepted by {', '.join(m)} at {', '.join(at)}." for m, at in best.items()]


def notes(result: dict[str, Any]) -> list[str]:
    """What a reader must know to read the figures."""
    # 1. What was measured, and on what.
    config, row = result["config"], result["sweeps"][0][0]
    lines = ["Given distributions. In brackets: 95 % intervals, from the errors of the sampling."]
    if row["positions"] > 1:
        text = (
            f"text {config['text']}" if config["text"] else f"own answers to {config['questions']}"
        )
        lines = [
            f"Target {config['target']}, head {config['head']}, draft step {config['step']}, "
            f"{text}: {row['positions']} positions of {row['groups']} questions or texts, "
            f"seed {config['seed']}.",
            "In brackets: 95 % intervals, from standard errors over questions or texts, at least those "
            "of the sampling.",
        ]
    lines.append(", ".join(f"{name} {x}" for name, x in result["environment"].items()) + ".")

    # 2. What does not hold for all methods.
    sampled = [row for rows in result["sweeps"] for row in rows if row["noise"] is not None]
    if sampled:
        methods = ", ".join(dict.fromkeys(row["method"] for row in sampled))
        lines.append(
            f"No formula states all rates of {methods}: they have a sampling error up to "
            f"{max(row['noise'] for row in sampled):.1%}, which may lift them above their α*."
        )
    if result["left_out"]:
        lines.append(f"Left out where they do not fit: {'; '.join(result['left_out'].values())}.")
    return lines
