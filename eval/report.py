"""Results for people: tables, notes and a verdict, as Markdown and as a page of HTML.

The page is one file that loads nothing from elsewhere. Jinja escapes whatever it fills in, so that no
model's text and no name becomes markup.
"""

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from rich.cells import cell_len

from treespec.eval.intervals import Figure
from treespec.files.printable import to_one_line

Cell = str | Figure | None
PROSE_COLUMNS = 100  # columns of a note in Markdown


@dataclass(frozen=True)
class Table:
    """Rows of cells by column; a page draws a bar below each figure.

    labels: the columns that name a row. They come first. reference: the bars' dashed line.
    """

    title: str
    labels: Sequence[str]
    rows: Sequence[Mapping[str, Cell]]
    reference: float | None = None

    @property
    def columns(self) -> dict[str, list[str]]:
        """The printable name of each column and its cells; empty columns are left out."""
        columns = {}
        for name in dict.fromkeys(chain(self.labels, *self.rows)):
            cells = [escape_cell(row.get(name)) for row in self.rows]
            if any(cells):
                columns[name] = [escape_cell(name), *cells]
        return columns


@dataclass(frozen=True)
class Plot:
    """Lines over one number, drawn on a page. along: its name. lines: the points (place, figure) in order, by name."""

    title: str
    along: str
    lines: Mapping[str, Sequence[tuple[float, Figure]]]

    @property
    def ends(self) -> tuple[float, float, float, float]:
        """The least and largest place, and the least and largest value."""
        places: list[float] = []
        values: list[Any] = []
        for place, figure in chain.from_iterable(self.lines.values()):
            places.append(place)
            values.append(figure["value"])
        return min(places), max(places), min(values), max(values)


@dataclass(frozen=True)
class EvalReport:
    """The results of a command. notes: how to read the tables. verdict: the conclusions, a sentence each."""

    tables: Sequence[Table]
    notes: Sequence[str]
    verdict: Sequence[str] = ()
    plots: Sequence[Plot] = ()


def render_markdown(report: EvalReport, width: int | None = None) -> str:
    """Render the whole report as Markdown; the columns of its tables are aligned in the source too.

    width: columns of a terminal; a wider table is cut between columns, each part with the labels.
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
    return "\n\n".join(parts) + "\n"


def render_markdown_table(table: Table, width: int | None = None) -> list[str]:
    """Render a table as lines of Markdown, an empty one first: labels to the left, figures to the right."""
    # 1. Columns whose cells are equally wide.
    labels = []
    others = []
    for name, cells in table.columns.items():
        if name in table.labels:
            labels.append(align_column(cells, to_left=True))
        else:
            others.append(align_column(cells, to_left=False))

    # 2. As many of them as fit, with the labels.
    lines = []
    for columns in split_columns(labels, others, width):
        if columns:
            lines.append("")
            for row in zip(*columns, strict=True):
                lines.append(f"| {' | '.join(row)} |")
    return lines


def align_column(cells: Sequence[str], to_left: bool) -> list[str]:
    """Pad a column's name and cells to one width, and put Markdown's rule between them."""
    escaped = [cell.replace("|", "\\|") for cell in cells]
    widest = max(2, max(map(cell_len, escaped)))
    lines = []
    for cell in escaped:
        gap = " " * (widest - cell_len(cell))
        lines.append(cell + gap if to_left else gap + cell)
    rule = "-" * widest if to_left else "-" * (widest - 1) + ":"
    lines.insert(1, rule)
    return lines


def split_columns(
    labels: Sequence[list[str]], others: Sequence[list[str]], width: int | None
) -> list[list[list[str]]]:
    """Cut a table's columns into parts that are narrower than `width`; None does not cut. Each part has all labels."""
    parts = [list(labels)]
    for column in others:
        room = sum(3 + cell_len(lines[0]) for lines in [*parts[-1], column])
        if width and room >= width and len(parts[-1]) > len(labels):
            parts.append(list(labels))
        parts[-1].append(column)
    return parts


def render_page(
    report: EvalReport, title: str, subtitle: str = "", setup: Sequence[tuple] = ()
) -> str:
    """Render the report as a page of HTML. setup: (name, value) of each thing that the figures depend on."""
    return fill_template("page.html", report=report, title=title, subtitle=subtitle, setup=setup)


def fill_template(template: str, **values: Any) -> str:
    """Fill a template of this folder with values."""
    environment = Environment(
        loader=PackageLoader("treespec.eval", "."),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["line"] = escape_cell
    return environment.get_template(template).render(**values)


def list_notes(template: str, **values: Any) -> list[str]:
    """Fill a template with values and list its paragraphs, each on one line."""
    paragraphs = fill_template(template, **values).split("\n\n")
    return [" ".join(note.split()) for note in paragraphs if note.strip()]


def wrap_list_item(text: str) -> str:
    """Make a list item of Markdown, wrapped between words."""
    wrapper = textwrap.TextWrapper(PROSE_COLUMNS, "- ", "  ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.fill(escape_cell(text))


def to_percent(figure: Figure) -> Figure:
    """Turn a share into percent."""
    ends: Any = dict(figure)
    for name, value in ends.items():
        if value is not None:
            ends[name] = 100 * value
    return ends


def escape_cell(cell: Cell) -> str:
    """Print a cell on one line, without control codes: names of files and categories may hold any.

    A figure becomes its value and 95 % interval, 1.49 (1.32–1.61), with one digit from 10 on; None becomes "".
    """
    if isinstance(cell, str):
        return to_one_line(re.sub(r"\s", " ", cell))
    if cell is None or cell["value"] is None:
        return ""
    low = cell["low"]
    high = cell["high"]
    digits = 1 if abs(cell["value"]) >= 10 else 2
    text = f"{cell['value']:.{digits}f}"
    if low is not None and high is not None:
        text += f" ({low:.{digits}f}–{high:.{digits}f})"
    return text
