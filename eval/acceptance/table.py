"""The lab's rates as tables, notes and a verdict.

The layout is that of Table 1 of Hu et al. 2025: a line per method, with α* below the methods that
draw in its way, and a column per temperature and number of draws. Given laws have a line per law
and a column per method.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from treespec.eval.acceptance.rates import Mean, Row
from treespec.eval.report import Report, Table

WIDTH = 8  # columns side by side


def report_of(result: dict[str, Any]) -> Report:
    """What OUT/acceptance.md and the terminal show."""
    tables = [table for rows in result["sweeps"] for table in tables_of(rows)]
    return Report(tables, notes(result), verdict(result["sweeps"]))


def tables_of(rows: Sequence[Row]) -> list[Table]:
    """The rates of one sweep: α, its distance to α*, and the measured rate."""
    kinds: dict[str, Callable[[Row], str]] = {
        "Acceptance rate α in %": lambda row: _percent(row["rate"]),
        "Below α* of its own draws, in points": lambda row: _percent(row["gap"], digits=2),
        "Measured on sampled outputs, in %": lambda row: _percent(row["measured"]),
    }
    varies, fixed = coordinates(rows)
    everywhere = place_of(rows[0], fixed)
    by_law = set(rows[0]["at"]) > {"temperature", "draft", "draws"}
    tables = []
    for kind, cell in kinds.items():
        # 1. The cells that hold something, by line and column.
        cells = {}
        for row in in_order(rows):
            place = label(row), place_of(row, varies)
            if text := cell(row):
                cells[place[::-1] if by_law else place] = text
        lines, columns = (list(dict.fromkeys(place[part] for place in cells)) for part in (0, 1))

        # 2. Tables of at most WIDTH columns.
        title = kind + (f" ({everywhere})" if everywhere else "")
        for start in range(0, len(columns), WIDTH):
            part = columns[start : start + WIDTH]
            body = [[line, *(cells.get((line, column), "") for column in part)] for line in lines]
            tables.append(Table(title, [""], part, body))
    return tables


def coordinates(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """(names of coordinates that vary among the rows, names of those that do not)."""
    names = dict.fromkeys(name for row in rows for name in row["at"])
    varies = [name for name in names if len({str(row["at"].get(name)) for row in rows}) > 1]
    fixed = [n for n, value in rows[0]["at"].items() if n not in varies and value != "same"]
    return (varies, fixed) if varies else (fixed, [])


def verdict(sweeps: Sequence[Sequence[Row]]) -> list[str]:
    """The methods that accept most, and where. It says nothing about the time a method takes.

    A sampled rate counts as no more than the α* of its draws, which bounds the true one, and as
    equal to rates within twice its sampling error.
    """
    lines = []
    for rows in sweeps:
        # 1. The best methods at each place; none if all are equal there.
        varies, _ = coordinates(rows)
        best: dict[tuple[str, ...], list[str]] = {}
        places: dict[str, list[Row]] = {}
        for row in rows:
            places.setdefault(place_of(row, varies), []).append(row)
        for place, here in places.items():
            optima = {row["drawn"]: row["rate"]["value"] for row in here if row["optimum"]}
            rates = {
                row["method"]: (
                    min(row["rate"]["value"], optima.get(row["drawn"], 1.0)),
                    row["noise"] or 0.0,
                )
                for row in here
                if not row["optimum"]
            }
            most, error = max(rates.values(), default=(0.0, 0.0))
            methods = tuple(
                method
                for method, (rate, noise) in rates.items()
                if most - rate <= max(0.0005, 2 * math.hypot(error, noise))
            )
            if len(methods) < len(rates):
                best.setdefault(methods, []).append(f"{place} ({most:.1%})".strip())

        # 2. A sentence for each set of methods.
        lines += [
            f"Most is accepted by {', '.join(methods)} at {', '.join(where)}."
            for methods, where in best.items()
        ]
    return lines


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Rows by how they draw, α* after its schemes; last the schemes whose α* is not known."""
    kinds = list(dict.fromkeys(row["drawn"] for row in rows if row["drawn"]))
    return sorted(rows, key=lambda row: kinds.index(row["drawn"]) if row["drawn"] else len(kinds))


def label(row: Row) -> str:
    """The method's name in tables."""
    return f"α* {row['method']}" if row["optimum"] else row["method"]


def place_of(row: Row, names: Sequence[str], gap: str = " ") -> str:
    """The row's coordinates of these names: T=0.6 K=2. gap: the text between them."""
    short = {"temperature": "T", "draws": "K"}
    parts = {short.get(name, name): row["at"][name] for name in names if name in row["at"]}
    shown = {name: f"{at:.3g}" if isinstance(at, float) else str(at) for name, at in parts.items()}
    return gap.join(f"{name}={at}" for name, at in shown.items())


def notes(result: dict[str, Any]) -> list[str]:
    """What a reader must know to read the figures."""
    # 1. What was measured, and on what.
    config, row = result["config"], result["sweeps"][0][0]
    if row["positions"] > 1:
        source = f"own answers to {config['questions']}"
        if config["text"]:
            source = f"text {config['text']}"
        lines = [
            f"Target {config['target']}, head {config['head']}, draft step {config['step']}, "
            f"{source}: {row['positions']} positions of {row['groups']} questions or texts, "
            f"seed {config['seed']}.",
            "In brackets: standard errors over questions or texts, at least those of the sampling; "
            "of measured rates, of the sampling alone.",
        ]
    else:
        lines = ["Given laws. In brackets: standard errors of the sampling."]
    facts = [f"{name} {value}" for name, value in result["environment"].items()]
    lines.append(", ".join(facts) + ".")

    # 2. What does not hold for all methods.
    rows = [row for rows in result["sweeps"] for row in rows]
    if sampled := [row for row in rows if row["noise"] is not None]:
        methods = ", ".join(dict.fromkeys(row["method"] for row in sampled))
        lines.append(
            f"No formula states all rates of {methods}: they have a sampling error up to "
            f"{max(row['noise'] for row in sampled):.1%}, which may lift them above their α*."
        )
    if result["left_out"]:
        lines.append(f"Left out where they do not fit: {'; '.join(result['left_out'].values())}.")
    return lines


def _percent(mean: Mean | None, digits: int = 1) -> str:
    """A mean and its error in percent: 71.2 (0.4). "" for None."""
    if mean is None or (value := mean["value"]) is None:
        return ""
    error = "" if mean["error"] is None else f" ({100 * mean['error']:.{digits}f})"
    return f"{round(100 * value, digits) + 0.0:.{digits}f}{error}"  # + 0.0: no -0.00
