"""The lab's rates as tables and notes.

The layout is that of Table 1 of Hu et al. 2025: a line per method, with α* below the methods that
draw in its way, and a column per temperature and number of draws. Given distributions have a line per distribution
and a column per method.
"""

from collections.abc import Sequence
from typing import Any

from treespec.eval.report import Cell, Report, Table, percent

Row = dict[str, Any]  # one method at one combination, as `rows_of` makes it
KINDS = {  # of figures in a row, by what their tables are called
    "rate": "Acceptance rate α in %",
    "gap": "Below α* of its own draws, in points",
}
SHORT = {"temperature": "T", "draws": "K"}


def report_of(result: dict[str, Any]) -> Report:
    """What OUT/acceptance.md, OUT/acceptance.html and the terminal show."""
    tables = [table_of(rows, kind) for rows in result["sweeps"] for kind in KINDS]
    return Report(tables, notes(result))


def table_of(rows: Sequence[Row], kind: str) -> Table:
    """One kind of figures of a sweep."""
    by_pair = set(rows[0]["at"]) > {"temperature", "draft", "draws"}
    lines: dict[str, dict[str, Cell]] = {}
    for row in rows:
        at = {SHORT.get(name, name): x for name, x in row["at"].items() if x != "same"}
        texts = {name: f"{x:.3g}" if isinstance(x, float) else x for name, x in at.items()}
        place = " ".join(f"{name}={x}" for name, x in texts.items())  # T=0.6 K=2
        line, column = (place, row["method"]) if by_pair else (row["method"], place)
        if row[kind] is not None:
            lines.setdefault(line, {"": line})[column] = percent(row[kind])
    return Table(KINDS[kind], [""], [*lines.values()])


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
            f"seed {config['seed']}. In brackets: 95 % intervals, from standard errors over "
            "questions or texts, at least those of the sampling."
        ]
    lines.append(", ".join(f"{name} {x}" for name, x in result["environment"].items()) + ".")

    # 2. What does not hold for all methods.
    sampled = [row for rows in result["sweeps"] for row in rows if row["noise"]]
    if sampled:
        methods = ", ".join(dict.fromkeys(row["method"] for row in sampled))
        lines.append(
            f"No formula states all rates of {methods}: they have a sampling error up to "
            f"{max(row['noise'] for row in sampled):.1%}, which may lift them above their α*."
        )
    if result["left_out"]:
        lines.append(f"Left out where they do not fit: {'; '.join(result['left_out'].values())}.")
    return lines
