"""Format tables, plots and figures for other programs: CSV with every digit, and LaTeX with booktabs."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from treespec.eval.header import RunHeader
from treespec.eval.report import Cell, EvalPage, Plot, Table, escape_cell

SYSTEM_COLUMNS = ("name", "drafter", "method", "tree", "temperature", "batch", "peer", "lossless")
LATEX_SIGNS = {  # every other sign stands for itself
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    ">": r"$>$",
    "–": "--",
    "…": r"\ldots{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "τ": r"$\tau$",
    "α": r"$\alpha$",
    "ε": r"$\varepsilon$",
    "*": r"$^{*}$",
}


def format_table_csv(table: Table) -> str:
    """Format a table as CSV. A figure takes three columns, its value and the ends of its interval, unrounded."""
    # 1. The headings.
    figure_columns = set[str]()
    for row in table.rows:
        figure_columns |= {name for name, cell in row.items() if isinstance(cell, dict)}
    headings: list[str] = []
    for name, column in table.columns.items():
        headings.append(column[0])
        if name in figure_columns:
            headings += [f"{column[0]} low", f"{column[0]} high"]

    # 2. The rows.
    lines = [headings]
    for row in table.rows:
        cells: list[str] = []
        for name in table.columns:
            if name in figure_columns:
                cells += format_ends(row.get(name))
            else:
                cells.append(escape_cell(row.get(name)))
        lines.append(cells)
    return format_csv(lines)


def format_ends(cell: Cell) -> list[str]:
    """Format a cell of a column of figures as three cells; an absent number is ""."""
    if cell is None or isinstance(cell, str):
        return [escape_cell(cell), "", ""]
    ends = []
    for value in (cell["value"], cell["low"], cell["high"]):
        ends.append("" if value is None else repr(value))
    return ends


def format_plot_csv(plot: Plot) -> str:
    """Format a plot as CSV, a row for each point."""
    lines = [["line", plot.along, plot.measure, f"{plot.measure} low", f"{plot.measure} high"]]
    for name, points in plot.lines.items():
        for position, figure in points:
            lines.append([escape_cell(name), repr(position), *format_ends(figure)])
    return format_csv(lines)


def format_summary_csv(summary: Mapping[str, Any]) -> str:
    """Format the figures of OUT/report.json as CSV: for each system a row of all questions and one of each category.

    A figure with an interval takes three columns: its value and the ends.
    """
    # 1. The rows, each with the columns that it has.
    rows: list[dict[str, object]] = []
    for row in summary["rows"]:
        names = {name: row[name] for name in SYSTEM_COLUMNS}
        for group, figures in {"overall": row["overall"], **row["categories"]}.items():
            rows.append(names | {"group": group} | flatten_figures(figures))

    # 2. One heading for every column of a row.
    headings: dict[str, None] = {}
    for cells in rows:
        headings |= dict.fromkeys(cells)
    lines = [list(headings)]
    for cells in rows:
        lines.append([format_value(cells.get(name)) for name in headings])
    return format_csv(lines)


def flatten_figures(figures: Mapping[str, Any], before: str = "") -> dict[str, object]:
    """Flatten figures to columns: those below `cycle_ms` are cycle_ms_target and so on, those of a list have a number.

    before: the beginning of each column's name.
    """
    columns: dict[str, object] = {}
    for name, value in figures.items():
        if isinstance(value, list):
            value = {str(number): item for number, item in enumerate(value, 1)}
        if not isinstance(value, dict):
            columns[before + name] = value
        elif "value" in value:
            columns[before + name] = value["value"]
            columns[f"{before}{name}_low"] = value["low"]
            columns[f"{before}{name}_high"] = value["high"]
        else:
            columns |= flatten_figures(value, f"{before}{name}_")
    return columns


def format_value(value: object) -> str:
    """Format a number or a text for a CSV cell; None becomes ""."""
    if value is None:
        return ""
    if isinstance(value, float):
        return repr(value)
    return escape_cell(str(value))


def format_csv(lines: Sequence[Sequence[str]]) -> str:
    """Format lines of cells as CSV."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(lines)
    return file.getvalue()


def format_page_csv(page: EvalPage) -> str:
    """Format all tables of a page as CSV, an empty line between them."""
    return "\n".join(format_table_csv(table) for table in page.report.tables if table.rows)


def format_page_latex(page: EvalPage) -> str:
    """Format all tables of a page as LaTeX, for a document that uses the package booktabs."""
    tables = [format_table_latex(table, page.header) for table in page.report.tables if table.rows]
    return "\n".join(tables)


def format_table_latex(table: Table, header: RunHeader) -> str:
    """Format a table as LaTeX. The caption says what was measured; a comment has the command."""
    # 1. The caption, and all facts as comments.
    facts = header.facts
    command = facts.pop("Command")
    caption = f"{table.title}. " + "; ".join(f"{name}: {value}" for name, value in facts.items())
    if header.caution:
        caption += f". {header.caution}"

    # 2. The table.
    columns = table.columns
    kinds = "".join("l" if name in table.labels else "r" for name in columns)
    rows = [
        " & ".join(map(escape_latex, cells)) + r" \\"
        for cells in zip(*columns.values(), strict=True)
    ]
    lines = [
        f"% {escape_cell(command)}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape_latex(escape_cell(caption))}}}",
        rf"\begin{{tabular}}{{{kinds}}}",
        r"\toprule",
        rows[0],
        r"\midrule",
        *rows[1:],
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def escape_latex(text: str) -> str:
    """Escape the signs that LaTeX reads, and write the field's Greek letters as its commands."""
    return "".join(LATEX_SIGNS.get(sign, sign) for sign in text)
