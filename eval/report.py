"""Results as tables, plots, notes and a verdict, and their Markdown.

Jinja escapes every value that a template of eval/ fills in, so that neither a model's text nor a name becomes markup.
"""

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from rich.cells import cell_len

from treespec.eval.header import RunHeader
from treespec.eval.intervals import Figure
from treespec.files.printable import to_one_line

Cell = str | Figure | None
PROSE_COLUMNS = 100  # width at which a note is wrapped in Markdown


@dataclass(frozen=True)
class Table:
    """Rows of cells by column. A page draws a bar below each figure.

    Attributes:
        title: heading of the table.
        labels: the columns that name a row; they come first.
        rows: the cells of each row, by column.
        reference: value at which the bars have a dashed line; None: no line.
        reference_name: what has that value.
    """

    title: str
    labels: Sequence[str]
    rows: Sequence[Mapping[str, Cell]]
    reference: float | None = None
    reference_name: str = ""

    @property
    def columns(self) -> dict[str, list[str]]:
        """The cells of each column, its printable name first. Columns without any text are left out."""
        columns = {}
        for name in dict.fromkeys(chain(self.labels, *self.rows)):
            cells = [escape_cell(row.get(name)) for row in self.rows]
            if any(cells):
                columns[name] = [escape_cell(name), *cells]
        return columns


@dataclass(frozen=True)
class Plot:
    """A line chart on a page.

    Attributes:
        title: heading of the chart.
        along: title of the horizontal axis.
        measure: title of the vertical axis.
        lines: points (x, figure) of each line by its name, x ascending.
    """

    title: str
    along: str
    measure: str
    lines: Mapping[str, Sequence[tuple[float, Figure]]]


@dataclass(frozen=True)
class EvalReport:
    """The results of a command.

    Attributes:
        tables: the figures.
        notes: how to read the tables, one paragraph each.
        verdict: the conclusions, one sentence each.
        plots: charts of the figures, which Markdown has not.
    """

    tables: Sequence[Table]
    notes: Sequence[str]
    verdict: Sequence[str] = ()
    plots: Sequence[Plot] = ()


@dataclass(frozen=True)
class EvalPage:
    """A report that may leave the machine: its header says what it is evidence of."""

    title: str
    header: RunHeader
    report: EvalReport


def render_markdown(
    report: EvalReport, width: int | None = None, header: RunHeader | None = None
) -> str:
    """Render the whole report as Markdown, with aligned columns.

    Args:
        report: the report.
        width: width of a terminal in characters; a wider table is cut between columns, and each part repeats the
            labels. Default: None, do not cut.
        header: what was measured, for the last section. Default: None, no such section.
    """
    parts = []
    for table in report.tables:
        lines = render_markdown_table(table, width)
        if lines:
            parts.append("\n".join([f"## {escape_cell(table.title)}", *lines]))
    if report.notes:
        parts.append("\n".join(map(wrap_list_item, report.notes)))
    if report.verdict:
        parts.append("## Verdict\n\n" + "\n".join(map(wrap_list_item, report.verdict)))
    if header is not None:
        facts = [f"{name}: {value}" for name, value in header.facts.items()]
        if header.caution:
            facts.insert(0, header.caution)
        parts.append("## Run\n\n" + "\n".join(map(wrap_list_item, facts)))
    return "\n\n".join(parts) + "\n"


def render_markdown_table(table: Table, width: int | None = None) -> list[str]:
    """Render a table as lines of Markdown, the first one empty. Labels are left-aligned, figures right-aligned."""
    # 1. Pad the cells of each column to one width.
    label_columns = []
    figure_columns = []
    for name, cells in table.columns.items():
        if name in table.labels:
            label_columns.append(align_column(cells, to_left=True))
        else:
            figure_columns.append(align_column(cells, to_left=False))

    # 2. Cut the table into parts that fit the width.
    lines = []
    for columns in split_columns(label_columns, figure_columns, width):
        if columns:
            lines.append("")
            for row in zip(*columns, strict=True):
                lines.append(f"| {' | '.join(row)} |")
    return lines


def align_column(cells: Sequence[str], to_left: bool) -> list[str]:
    """Pad a column's name and cells to one width, and insert Markdown's rule between them."""
    escaped = [cell.replace("|", "\\|") for cell in cells]
    width = max(2, max(map(cell_len, escaped)))
    lines = []
    for cell in escaped:
        gap = " " * (width - cell_len(cell))
        lines.append(cell + gap if to_left else gap + cell)
    rule = "-" * width if to_left else "-" * (width - 1) + ":"
    lines.insert(1, rule)
    return lines


def split_columns(
    label_columns: Sequence[list[str]], figure_columns: Sequence[list[str]], width: int | None
) -> list[list[list[str]]]:
    """Cut a table's columns into parts narrower than `width`, each with all label columns; None does not cut.

    A table of two figures beside one label, cut to a width of one figure:

        label  A  B         label  A     label  B
    """
    parts = [list(label_columns)]
    for column in figure_columns:
        width_with_column = sum(3 + cell_len(lines[0]) for lines in [*parts[-1], column])
        if width and width_with_column >= width and len(parts[-1]) > len(label_columns):
            parts.append(list(label_columns))
        parts[-1].append(column)
    return parts


def fill_template(template: str, **values: Any) -> str:
    """Fill a Jinja template of eval/ with values."""
    environment = Environment(
        loader=PackageLoader("treespec.eval", "."),
        autoescape=select_autoescape(["html", "svg"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["line"] = escape_cell
    return environment.get_template(template).render(**values)


def list_notes(template: str, **values: Any) -> list[str]:
    """Fill a template with values and return its paragraphs, each on one line."""
    paragraphs = fill_template(template, **values).split("\n\n")
    return [" ".join(note.split()) for note in paragraphs if note.strip()]


def wrap_list_item(text: str) -> str:
    """Format a text as a list item of Markdown, wrapped between words."""
    wrapper = textwrap.TextWrapper(PROSE_COLUMNS, "- ", "  ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.fill(escape_cell(text))


def to_percent(figure: Figure) -> Figure:
    """Convert a share to percent, with the ends of its interval."""
    ends: Any = dict(figure)
    for name, value in ends.items():
        if value is not None:
            ends[name] = 100 * value
    return ends


def escape_cell(cell: Cell) -> str:
    """Format a cell on one line, without control codes (names of files and categories may contain any).

    A figure becomes its value and 95 % interval, as 1.49 (1.32–1.61), with one decimal from 10 on. None becomes "".
    """
    if isinstance(cell, str):
        return to_one_line(re.sub(r"\s", " ", cell))
    if cell is None or cell["value"] is None:
        return ""
    digits = count_figure_digits(cell["value"])
    figure = round_figure(cell)
    text = f"{figure['value']:.{digits}f}"
    if figure["low"] is not None and figure["high"] is not None:
        text += f" ({figure['low']:.{digits}f}–{figure['high']:.{digits}f})"
    return text


def count_figure_digits(value: float) -> int:
    """Return how many decimals a figure is printed with."""
    if abs(value) >= 10:
        return 1
    return 2


def round_figure(figure: Figure) -> Figure:
    """Round a figure as it is printed; a value that rounds to -0.0 becomes 0.0. None stays None."""
    digits = 2
    if figure["value"] is not None:
        digits = count_figure_digits(figure["value"])
    rounded: Any = dict(figure)
    for name, value in rounded.items():
        if value is not None:
            rounded[name] = round(value, digits) + 0.0
    return rounded
