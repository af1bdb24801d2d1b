"""Results for people: tables, notes and a verdict, on a terminal, as Markdown, as a page of HTML.

The page is one file that loads nothing from elsewhere. Jinja escapes whatever it fills in, so that no
model's text and no name becomes markup.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
PROSE = 100  # columns of a note in Markdown


@dataclass(frozen=True)
class Table:
    """Rows under named columns.

    labels: names of the first columns, which name a row. columns: names of the other columns.
    rows: cells; a page draws a bar below each that is a figure. reference: its dashed line.
    """

    title: str
    labels: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    reference: float | None = None

    def part(self, kept: Sequence[int]) -> "Table":
        """Some of its columns, by number; labels come first."""
        count = len(self.labels)
        return replace(
            self,
            title=printable(self.title),
            labels=[self.labels[i] for i in kept if i < count],
            columns=[self.columns[i - count] for i in kept if i >= count],
            rows=[[row[i] for i in kept] for row in self.rows],
        )

    @property
    def filled(self) -> "Table":
        """Without empty columns."""
        cells = zip(*self.texts[1:], strict=True)
        return self.part([i for i, column in enumerate(cells) if any(column)])

    @property
    def texts(self) -> list[list[str]]:
        """The printable text of the names and of each row."""
        rows: list[Sequence[Cell]] = [(*self.labels, *self.columns), *self.rows]
        return [
            [printable(cell if isinstance(cell, str) else shown(cell)) for cell in row]
            for row in rows
        ]

    def bar(self, row: int, column: int) -> dict[str, float] | None:
        """The bar of a figure, and where its dashed line is, in percent of the cell's width."""
        figures = [cells[column] for cells in self.rows]
        ends = [self.reference or 0.0, 1e-9]
        ends += [one["high"] or one["value"] or 0.0 for one in figures if isinstance(one, dict)]
        figure = figures[row]
        if not isinstance(figure, dict) or figure["value"] is None:
            return None
        lengths: dict[str, Any] = {**figure, "reference": self.reference}
        return {name: 98 * max(x, 0.0) / max(ends) for name, x in lengths.items() if x is not None}


@dataclass(frozen=True)
class Report:
    """What a command measured. notes: how to read the tables. verdict: what follows from them."""

    tables: Sequence[Table]
    notes: Sequence[str]
    verdict: Sequence[str] = ()

    @property
    def filled(self) -> list[Table]:
        """The tables that have rows, as `Table.filled`."""
        return [table.filled for table in self.tables if table.rows]

    @property
    def prose(self) -> list[tuple[str, str]]:
        """Title and text of the notes and of the verdict, as lists of Markdown."""
        parts = {"": self.notes, "Verdict": self.verdict}
        return [(title, "\n".join(map(item, lines))) for title, lines in parts.items() if lines]


def markdown(report: Report) -> str:
    """The whole report as Markdown, whose tables have aligned columns in the source too."""
    parts = [(table.title, "\n".join(markdown_lines(table))) for table in report.filled]
    parts += report.prose
    return "\n\n".join(f"## {title}\n\n{text}" if title else text for title, text in parts) + "\n"


def markdown_lines(table: Table) -> list[str]:
    """The table as lines of Markdown: labels to the left, figures to the right."""
    one, aligned = table.filled, []
    for place, column in enumerate(zip(*one.texts, strict=True)):
        head, *cells = (cell.replace("|", "\\|") for cell in column)
        width = max(2, *map(cell_len, (head, *cells)))
        left = place < len(one.labels)
        gaps = [(" " * (width - cell_len(cell)), cell) for cell in (head, *cells)]
        lines = [cell + gap if left else gap + cell for gap, cell in gaps]
        lines.insert(1, "-" * (width - 1) + ("-" if left else ":"))
        aligned.append(lines)
    return [f"| {' | '.join(cells)} |" for cells in zip(*aligned, strict=True)]


def show(report: Report, console: Console) -> None:
    """Print on a terminal. No figure is broken; wide tables are split between columns."""
    for table in report.filled:
        console.print(f"\n{table.title}", style="bold", markup=False, emoji=False, highlight=False)
        for piece in pieces(table, console.width):
            draw(piece, console)
    for title, text in report.prose:
        said = (f"\n{title}" if title else "", text)
        console.print(*said, sep="\n", markup=False, emoji=False, highlight=False)


def pieces(table: Table, width: int) -> Iterator[Table]:
    """The table, split between its columns into pieces of `width` cells; labels are repeated."""
    widths, labels = list(map(widest, zip(*table.texts, strict=True))), [*range(len(table.labels))]
    room = width - sum(2 + min(LABEL, widths[label]) for label in labels)
    taken, left = list[int](), room
    for column in range(len(labels), len(widths)):
        if taken and 2 + widths[column] > left:
            yield table.part([*labels, *taken])
            taken, left = [], room
        taken.append(column)
        left -= 2 + widths[column]
    yield table.part([*labels, *taken])


def widest(column: Sequence[str]) -> int:
    """Terminal cells of the widest cell of a column, or of a word of its name."""
    name, *cells = column
    return max(map(cell_len, [*name.split(), *cells]))


def draw(table: Table, console: Console) -> None:
    """Print one piece of a table: labels wrap, figures do not."""
    drawn = Drawn(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for place, column in enumerate(zip(*table.texts, strict=True)):
        if place < len(table.labels):
            drawn.add_column(Text(column[0]), max_width=LABEL, overflow="fold")
        else:
            head = "\n".join(textwrap.wrap(column[0], widest(column)))
            drawn.add_column(Text(head), justify="right", no_wrap=True)
    for row in table.texts[1:]:
        drawn.add_row(*map(Text, row))
    console.print(drawn)


def page(report: Report, title: str, **more: Any) -> str:
    """The report as a page of HTML. more: other values that page.html shows."""
    empty: dict[str, Any] = {"subtitle": "", "setup": ()}
    return filled_in("page.html", report=report, title=title, **empty | more)


def filled_in(template: str, **values: Any) -> str:
    """A template of this folder with its values."""
    environment = Environment(
        loader=PackageLoader("treespec.eval", "."),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["line"] = printable
    return environment.get_template(template).render(**values)


def item(text: str) -> str:
    """A list item of Markdown, wrapped between words."""
    wrapper = textwrap.TextWrapper(PROSE, "- ", "  ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.fill(printable(text))


def printable(text: str) -> str:
    """The text on one line, without control codes: names of files and categories may hold any."""
    return one_line("".join(" " if c.isspace() else c for c in text))


def percent(figure: Figure | None) -> Figure | None:
    """A share in percent."""
    if figure is None:
        return None
    ends: Any = {name: None if x is None else 100 * x for name, x in dict[str, Any](figure).items()}
    return ends


def shown(figure: Figure | None) -> str:
    """A value and its 95 % interval: 1.49 (1.32–1.61); 10 and more with one digit. "" for None."""
    if figure is None or figure["value"] is None:
        return ""
    low, high, digits = figure["low"], figure["high"], 1 if abs(figure["value"]) >= 10 else 2
    limits = "" if low is None or high is None else f" ({low:.{digits}f}–{high:.{digits}f})"
    return f"{figure['value']:.{digits}f}{limits}"
