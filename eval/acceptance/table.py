"""The lab's rates as people read them.

Laid out as Table 1 of Hu et al. 2025: a line a method, with α* below the methods that draw so, a column a
temperature and number of draws. Of given laws, a line a law and a column a method.
"""

from collections.abc import Callable, Sequence
from typing import Any

from treespec.eval.report import Report, Table

WIDTH = 8  # columns side by side
Row = dict[str, Any]


def report_of(result: dict[str, Any]) -> Report:
    """What OUT/acceptance.md and the terminal show."""
    tables = [table for rows in result["sweeps"] for table in tables_of(rows)]
    return Report(tables, notes(result), verdict(result["sweeps"]))


def tables_of(rows: Sequence[Row]) -> list[Table]:
    """The rates of one sweep."""
    cells: dict[str, Callable[[Row], str]] = {
        "Acceptance rate α in %": lambda row: _percent(row["rate"]),
        "Below α* of its own draws, in points": lambda row: _percent(row["gap"], digits=2),
        "Measured on sampled outputs, in %": lambda row: _percent(row["measured"]),
    }
    varies, fixed = coordinates(rows)
    by_law = set(rows[0]["at"]) > {"temperature", "draft", "draws"}
    places = list(dict.fromkeys(place_of(row, varies, " ") for row in rows))
    given = place_of(rows[0], fixed, " ")
    tables = []
    for title, cell in cells.items():
        filled = {(label(row), place_of(row, varies, " ")): cell(row) for row in in_order(rows)}
        filled = {at: text for at, text in filled.items() if text}
        if not filled:
            continue
        labels = list(dict.fromkeys(name for name, _ in filled))
        if by_law:
            filled = {(place, name): text for (name, place), text in filled.items()}
        lines, columns = (places, labels) if by_law else (labels, places)
        for start in range(0, len(columns), WIDTH):
            part = columns[start : start + WIDTH]
            table = [[line, *(filled.get((line, column), "") for column in part)] for line in lines]
            tables.append(Table(title + (f" ({given})" if given else ""), [""], part, table))
    return tables


def coordinates(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """(the names of what varies among the rows, of what is the same in all of them)."""
    names = dict.fromkeys(name for row in rows for name in row["at"])
    varies = [name for name in names if len({str(row["at"].get(name)) for row in rows}) > 1]
    fixed = [
        name for name, value in rows[0]["at"].items() if name not in varies and value != "same"
    ]
    return (varies, fixed) if varies else (fixed, [])


def verdict(sweeps: Sequence[Sequence[Row]]) -> list[str]:
    """Who accepts most, and where: this says nothing of the time that a method takes."""
    lines = []
    for rows in sweeps:
        varies, _ = coordinates(rows)
        best: dict[tuple[str, ...], list[str]] = {}
        for place in dict.fromkeys(place_of(row, varies, " ") for row in rows):
            here = [
                row for row in rows if place_of(row, varies, " ") == place and not row["optimum"]
            ]
            rates = {row["method"]: f"{100 * row['rate']['value']:.1f}" for row in here}
            most = max(rates.values(), key=float, default="")
            methods = tuple(method for method, rate in rates.items() if rate == most)
            if len(methods) < len(rates):  # else there is nothing to choose
                best.setdefault(methods, []).append(f"{place} ({most}%)".strip())
        lines += [
            f"Most is accepted by {', '.join(methods)} at {', '.join(at)}."
            for methods, at in best.items()
        ]
    return lines


def in_order(rows: Sequence[Row]) -> list[Row]:
    """α* after the schemes that draw so, those without one last."""
    kinds = list(dict.fromkeys(row["drawn"] for row in rows if row["drawn"]))
    return sorted(rows, key=lambda row: kinds.index(row["drawn"]) if row["drawn"] else len(kinds))


def label(row: Row) -> str:
    return f"α* {row['method']}" if row["optimum"] else row["method"]


def place_of(row: Row, names: Sequence[str], gap: str) -> str:
    """Where a row stands, in the names given: T=0.6 K=2."""
    short = {"temperature": "T", "draws": "K"}
    parts = {short.get(name, name): row["at"][name] for name in names if name in row["at"]}
    return gap.join(f"{name}={_short(value)}" for name, value in parts.items())


def notes(result: dict[str, Any]) -> list[str]:
    """What one must know to read the figures."""
    config, row = result["config"], result["sweeps"][0][0]
    lines = []
    if row["positions"] > 1:
        source = (
            f"text {config['text']}" if config["text"] else f"own answers to {config['questions']}"
        )
        lines.append(
            f"Target {config['target']}, head {config['head']}, draft step {config['step']}, {source}: "
            f"{row['positions']} positions of {row['groups']} questions or texts, seed {config['seed']}."
        )
        lines.append(
            "In brackets: standard errors over questions or texts; of measured rates, of the sampling alone."
        )
    else:
        lines.append("Given laws. In brackets: standard errors of the sampling.")
    lines.append(
        ", ".join(f"{name} {value}" for name, value in result["environment"].items()) + "."
    )
    noise = [row["noise"] for rows in result["sweeps"] for row in rows if row["noise"] is not None]
    names = {
        row["method"]: None for rows in result["sweeps"] for row in rows if row["noise"] is not None
    }
    if names:
        lines.append(
            f"No formula states all rates of {', '.join(names)}: they have a sampling error up to {max(noise):.1%}."
        )
    if result["left_out"]:
        lines.append(f"Left out where they do not fit: {'; '.join(result['left_out'].values())}.")
    return lines


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _percent(figure: dict[str, float | None] | None, digits: int = 1) -> str:
    if figure is None or figure["value"] is None:
        return ""
    error = "" if figure["error"] is None else f" ({100 * figure['error']:.{digits}f})"
    return f"{round(100 * figure['value'], digits) + 0.0:.{digits}f}{error}"  # no -0.00
