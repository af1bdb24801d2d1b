"""The lab's rates as tables and notes.

The layout is that of Table 1 of Hu et al. 2025: a line per method, with α* below the methods that
draw in its way, and a column per temperature and number of draws. Given distributions have a line per distribution
and a column per method.
"""

from collections.abc import Sequence
from typing import Any

from treespec.eval.report import Cell, Report, Table, notes, percent

Row = dict[str, Any]  # one method at one combination, as `rows_of` makes it
KINDS = {  # of figures in a row, by what their tables are called
    "rate": "Acceptance rate α in %",
    "gap": "Below α* of its own draws, in points",
}
SHORT = {"temperature": "T", "draws": "K"}


def report_of(result: dict[str, Any]) -> Report:
    """What OUT/acceptance.md, OUT/acceptance.html and the terminal show."""
    tables = [table_of(rows, kind) for rows in result["sweeps"] for kind in KINDS]
    sampled = [row for rows in result["sweeps"] for row in rows if row["noise"]]
    first = result["sweeps"][0][0]
    return Report(tables, notes("acceptance/notes.txt", **result, sampled=sampled, first=first))


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
