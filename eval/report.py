"""Results for people: tables, notes and a verdict, on a terminal, as Markdown, as a page of HTML.

The page is one file that loads nothing from elsewhere. Jinja escapes whatever it fills in, so that no
model's text and no name becomes markup.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Drawn
from rich.text import Text

from treespec.eval.intervals import Figure
from treespec.requests.events import Cycle
from treespec.requests.picture import picture
from treespec.text.strings import one_line

LABEL = 32  # most columns of a label on a terminal
PROSE = 100  # columns of a note in Markdown


@dataclass(frozen=True)
class Table:
    """Rows of text under named columns.

    labels: names of the first columns, which name a row. columns: names of the other columns, which
    hold figures. rows: the text of all cells. bars: what a page draws in a column, a figure a row.
    """

    title: str
    labels: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    bars: Mapping[str, Sequence[Figure | None]] = field(default_factory=dict)

    @property
    def filled(self) -> "Table":
        """Its printable text, without empty columns."""
        rows: list[Sequence[str]] = [(*self.labels, *self.columns), *self.rows]
        columns = [[printable(cell) for cell in column] for column in zip(*rows, strict=True)]
        kept = [(i, column) for i, column in enumerate(columns) if any(column[1:])]
        names, *cells = zip(*(column for _, column in kept), strict=True)
        count = sum(i < len(self.labels) for i, _ in kept)
        return replace(
            self,
            title=printable(self.title),
            labels=names[:count],
            columns=names[count:],
            rows=cells,
        )

    def bar(self, column: str, row: int) -> dict[str, float] | None:
        """The figure that a page draws in a cell, and `one` on its axis, in percent of its width."""
        figures = self.bars.get(column, ())
        figure = figures[row] if row < len(figures) else None
        if figure is None or figure["value"] is None:
            return None
        ends = [1.0, *(one["high"] or one["value"] or 0.0 for one in figures if one)]
        lengths: dict[str, Any] = {**figure, "one": 1.0}
        return {name: 98 / max(ends) * x for name, x in lengths.items() if x is not None}


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
    for place, column in enumerate(zip((*one.labels, *one.columns), *one.rows, strict=True)):
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


def pieces(table: Table, width: int) -> list[Table]:
    """The table, split between its columns into pieces of `width` cells; labels are repeated."""
    count, parts, left = len(table.labels), list[list[int]](), 0
    labels = sum(2 + min(LABEL, widest(table, label)) for label in range(count))
    for column in range(count, count + len(table.columns)):
        if 2 + widest(table, column) > left or not parts:
            parts.append([*range(count)])
            left = width - labels
        left -= 2 + widest(table, column)
        parts[-1].append(column)
    names = (*table.labels, *table.columns)
    return [
        replace(
            table,
            columns=[names[column] for column in part[count:]],
            rows=[[row[column] for column in part] for row in table.rows],
        )
        for part in parts
    ]


def widest(table: Table, column: int) -> int:
    """Terminal cells of the widest figure of a column, or of a word of its name."""
    words = (*table.labels, *table.columns)[column].split()
    return max(map(cell_len, [*words, *(row[column] for row in table.rows)]))


def draw(table: Table, console: Console) -> None:
    """Print one piece of a table: labels wrap, figures do not."""
    drawn = Drawn(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for name in table.labels:
        drawn.add_column(Text(name), max_width=LABEL, overflow="fold")
    for column, name in enumerate(table.columns, len(table.labels)):
        head = "\n".join(textwrap.wrap(name, widest(table, column)))
        drawn.add_column(Text(head), justify="right", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    console.print(drawn)


def page(report: Report, title: str, **more: Any) -> str:
    """The report as a page of HTML. more: other values that page.html shows."""
    empty: dict[str, Any] = {"subtitle": "", "setup": (), "traced": ()}
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
    environment.filters |= {"line": printable, "tree": tree}
    return environment.get_template(template).render(**values)


def tree(cycle: Cycle) -> Markup:
    """A drafted tree in colours, as HTML."""
    console = Console(record=True, width=1000, file=StringIO(), force_terminal=True)
    console.print(picture(cycle), soft_wrap=True, crop=False)
    return Markup(console.export_html(inline_styles=True, code_format="{code}"))


def item(text: str) -> str:
    """A list item of Markdown, wrapped between words."""
    wrapper = textwrap.TextWrapper(PROSE, "- ", "  ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.fill(printable(text))


def printable(text: str) -> str:
    """The text on one line, without control codes: names of files and categories may hold any."""
    return one_line("".join(" " if c.isspace() else c for c in text))


def percent(figure: Figure | None, digits: int = 1) -> str:
    """A share or a difference of shares in percent, with its interval."""
    return shown(figure, digits, 100.0)


def shown(figure: Figure | None, digits: int = 2, factor: float = 1.0) -> str:
    """A value and its 95 % interval as a cell of a table: 1.49 (1.32–1.61)."""
    if figure is None or figure["value"] is None:
        return ""
    low, high = figure["low"], figure["high"]
    limits = ""
    if low is not None and high is not None:
        limits = f" ({factor * low:.{digits}f}–{factor * high:.{digits}f})"
    return f"{factor * figure['value']:.{digits}f}{limits}"
