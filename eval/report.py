"""Results for people: tables, notes and a verdict, on a terminal, as Markdown, as a page of HTML.

The page is one file that loads nothing from elsewhere. Jinja escapes whatever it fills in, so that no
model's text and no name becomes markup.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Drawn
from rich.text import Text

from treespec.eval.intervals import Figure
from treespec.text.strings import one_line

Cell = str | Figure | None
LABEL = 32  # most columns of a label on a terminal
GAP = 3  # columns between two on a terminal
PROSE = 100  # columns of a note in Markdown


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
        names = dict.fromkeys([*self.labels, *chain.from_iterable(self.rows)])
        cells = {name: [shown(row.get(name)) for row in self.rows] for name in names}
        return {name: [shown(name), *own] for name, own in cells.items() if any(own)}

    def bar(self, name: str, figure: Figure) -> dict[str, float]:
        """The bar of a figure and its dashed line, in percent of the cell's width."""
        figures = [cell for row in self.rows if isinstance(cell := row.get(name), dict)]
        longest = [one["high"] or one["value"] or 0.0 for one in figures]
        lengths: dict[str, Any] = {**figure, "reference": self.reference}
        most = max(*longest, self.reference or 0.0, 1e-9)
        return {part: 98 * max(x, 0.0) / most for part, x in lengths.items() if x is not None}


@dataclass(frozen=True)
class Report:
    """What a command measured. notes: how to read the tables. verdict: what follows from them."""

    tables: Sequence[Table]
    notes: Sequence[str]
    verdict: Sequence[str] = ()

    @property
    def prose(self) -> list[str]:
        """Notes and verdict, as lists of Markdown."""
        parts = {"": self.notes, "## Verdict\n\n": self.verdict}
        return [title + "\n".join(map(item, lines)) for title, lines in parts.items() if lines]


def markdown(report: Report) -> str:
    """The whole report as Markdown, whose tables have aligned columns in the source too."""
    parts = [
        "\n".join([f"## {shown(table.title)}\n", *markdown_lines(table)])
        for table in report.tables
        if table.rows
    ]
    return "\n\n".join([*parts, *report.prose]) + "\n"


def markdown_lines(table: Table) -> list[str]:
    """The table as lines of Markdown: labels to the left, figures to the right."""
    aligned = []
    for name, column in table.columns.items():
        cells, left = [cell.replace("|", "\\|") for cell in column], name in table.labels
        width = max(2, *map(cell_len, cells))
        gaps = [" " * (width - cell_len(cell)) for cell in cells]
        lines = [c + gap if left else gap + c for c, gap in zip(cells, gaps, strict=True)]
        lines.insert(1, "-" * (width - 1) + ("-" if left else ":"))
        aligned.append(lines)
    return [f"| {' | '.join(cells)} |" for cells in zip(*aligned, strict=True)]


def show(report: Report, console: Console) -> None:
    """Print on a terminal."""
    for table in report.tables:
        if table.rows:
            console.print(Text(f"\n{shown(table.title)}", "bold"))
            draw(table, console)
    for text in report.prose:
        console.print(Text(f"\n{text}"))


def draw(table: Table, console: Console) -> None:
    """Print a table. Labels wrap, figures do not: a wide table is split, each part with the labels."""
    # 1. The columns of each part.
    columns = table.columns
    widths = {name: widest(column) for name, column in columns.items()}
    labels = [name for name in columns if name in table.labels]
    room = console.width + GAP - sum(GAP + min(LABEL, widths[name]) for name in labels)
    parts, left = [[*labels]], room
    for name in [name for name in columns if name not in labels]:
        if len(parts[-1]) > len(labels) and GAP + widths[name] > left:
            parts.append([*labels])
            left = room
        parts[-1].append(name)
        left -= GAP + widths[name]

    # 2. The parts.
    for part in parts:
        drawn = Drawn(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
        for name in part:
            if name in labels:
                drawn.add_column(Text(columns[name][0]), max_width=LABEL, overflow="fold")
            else:
                head = "\n".join(textwrap.wrap(columns[name][0], widths[name]))
                drawn.add_column(Text(head), justify="right", no_wrap=True)
        for row in zip(*(columns[name][1:] for name in part), strict=True):
            drawn.add_row(*map(Text, row))
        console.print(drawn)


def widest(column: Sequence[str]) -> int:
    """Terminal cells of the widest cell of a column, or of a word of its name."""
    name, *cells = column
    return max(map(cell_len, [*name.split(), *cells]))


def page(report: Report, title: str, subtitle: str = "", setup: Sequence[tuple] = ()) -> str:
    """The report as a page of HTML. setup: pairs of what the figures depend on, and its value."""
    return filled_in("page.html", report=report, title=title, subtitle=subtitle, setup=setup)


def filled_in(template: str, **values: Any) -> str:
    """A template of this folder with its values."""
    environment = Environment(
        loader=PackageLoader("treespec.eval", "."),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["line"] = shown
    return environment.get_template(template).render(**values)


def item(text: str) -> str:
    """A list item of Markdown, wrapped between words."""
    wrapper = textwrap.TextWrapper(PROSE, "- ", "  ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.fill(shown(text))


def percent(figure: Figure | None) -> Figure | None:
    """A share in percent."""
    if figure is None:
        return None
    ends: Any = {name: None if x is None else 100 * x for name, x in dict[str, Any](figure).items()}
    return ends


def shown(cell: Cell) -> str:
    """A text on one line, without control codes: names of files and categories may hold any.

    Of a figure its value and 95 % interval: 1.49 (1.32–1.61); 10 and more with one digit. "" for
    None.
    """
    if isinstance(cell, str):
        return one_line("".join(" " if c.isspace() else c for c in cell))
    if cell is None or cell["value"] is None:
        return ""
    low, high, digits = cell["low"], cell["high"], 1 if abs(cell["value"]) >= 10 else 2
    limits = "" if low is None or high is None else f" ({low:.{digits}f}–{high:.{digits}f})"
    return f"{cell['value']:.{digits}f}{limits}"
