"""Results for people: tables, notes and a verdict, for a terminal or as a file of Markdown."""

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size

from treespec.text.strings import one_line

if TYPE_CHECKING:
    from rich.console import Console

GAP = "  "  # between columns
LABEL = 16  # columns of a label that is wrapped, if its parts fit
PROSE = 100  # columns of a note in Markdown

Column = list[list[str]]  # the lines of its head, then those of each cell


@dataclass(frozen=True)
class Table:
    """Rows of text under named columns.

    labels: names of the first columns, which name a row. columns: names of the other columns, which
    hold figures. rows: the text of all cells; a figure may end in brackets, "1.49 (1.32–1.61)".
    brief: on a terminal too narrow for the brackets, leave them out. Default: stack them below.
    """

    title: str
    labels: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    brief: bool = False

    @property
    def filled(self) -> "Table":
        """Its printable text, without empty columns."""
        rows: list[Sequence[str]] = [(*self.labels, *self.columns), *self.rows]
        columns = [[printable(cell) for cell in column] for column in zip(*rows, strict=True)]
        count = len(self.labels)
        labels, figures = (
            [c for c in part if any(c[1:])] for part in (columns[:count], columns[count:])
        )
        names, *cells = zip(*labels, *figures, strict=True)
        heads = names[: len(labels)], names[len(labels) :]
        return Table(printable(self.title), *heads, cells, self.brief)


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

    def parts(self, width: int, draw: Callable[[Table], list[str]]) -> list[tuple[str, str]]:
        """The title ("" of the notes) and text of each part. draw: the lines of a table."""
        found = [(table.title, "\n".join(draw(table))) for table in self.filled]
        for title, items in {"": self.notes, "Verdict": self.verdict}.items():
            found += [(title, "\n".join(_item(item, width) for item in items))] if items else []
        return found


def markdown(report: Report) -> str:
    """The whole report as Markdown, whose tables have aligned columns in the source too."""
    parts = report.parts(PROSE, markdown_lines)
    return "\n\n".join(f"## {title}\n\n{text}" if title else text for title, text in parts) + "\n"


def show(report: Report, console: "Console") -> None:
    """Print on a terminal. No word or number is broken; wide tables are split between columns."""
    for title, text in report.parts(console.width, lambda one: terminal_lines(one, console.width)):
        for said, style in ((title and f"\n{title}", "bold"), (text, "")):
            console.print(
                said, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True
            )


def markdown_lines(table: Table) -> list[str]:
    """The table as lines of Markdown."""
    labels, figures = (
        [[[line.replace("|", "\\|") for line in cell] for cell in column] for column in part]
        for part in _columns(table)
    )
    return [f"| {' | '.join(cells)} |" for cells in _lines(labels, figures, "-", ":")]


def terminal_lines(table: Table, width: int) -> list[str]:
    """The table, split between columns into pieces of at most `width` cells; labels are repeated.

    Of four layouts (figures on one line or two, labels whole or narrowed) it is the first that fits
    in the fewest pieces.
    """
    # 1. The pieces of each layout.
    packed: list[list[tuple[list[Column], list[Column]]]] = []
    for cut, narrow in product((False, True), (False, True)):
        labels, figures = _columns(table)
        figures = [_figure(column, cut, table.brief) for column in figures]
        if narrow:
            room = width - max(map(_width, figures), default=0) - len(GAP) * len(labels)
            labels = _narrowed(labels, room)
        pieces: list[tuple[list[Column], list[Column]]] = [(labels, [])]
        for figure in figures:
            if pieces[-1][1] and _wide(labels, [*pieces[-1][1], figure]) > width:
                pieces.append((labels, []))
            pieces[-1][1].append(figure)
        packed.append(pieces)

    # 2. The best of them, with an empty line between pieces.
    best = min(packed, key=lambda pieces: (max(_wide(*p) for p in pieces) > width, len(pieces)))
    drawn = (["", *(GAP.join(cells).rstrip() for cells in _lines(*piece))] for piece in best)
    return [line for piece in drawn for line in piece][1:]


def _columns(table: Table) -> tuple[list[Column], list[Column]]:
    """Its labels and figures, every cell one line."""
    one = table.filled
    rows = [(*one.labels, *one.columns), *one.rows]
    columns = [[[cell] for cell in column] for column in zip(*rows, strict=True)]
    return columns[: len(one.labels)], columns[len(one.labels) :]


def _lines(
    labels: list[Column], figures: list[Column], rule: str = "─", end: str = "─"
) -> Iterator[tuple[str, ...]]:
    """The padded cells of every line: labels to the left, figures to the right, heads to the bottom.

    A line of `rule` stands below the heads, and ends in `end` below a figure's.
    """
    columns = [*labels, *figures]
    heights = [max(map(len, row)) for row in zip(*columns, strict=True)]
    drawn = []
    for number, (head, *cells) in enumerate(columns):
        width = max(2, _width(columns[number])) if rule == "-" else _width(columns[number])
        last = rule if number < len(labels) else end
        lines = [""] * (heights[0] - len(head)) + head + [rule * (width - 1) + last]
        for cell, height in zip(cells, heights[1:], strict=True):
            lines += cell + [""] * (height - len(cell))
        gaps = [" " * (width - cell_len(line)) for line in lines]
        pairs = zip(lines, gaps, strict=True)
        drawn.append([a + gap if number < len(labels) else gap + a for a, gap in pairs])
    return zip(*drawn, strict=True)


def _width(column: Column) -> int:
    """Terminal cells of its widest line."""
    return max(cell_len(line) for cell in column for line in cell)


def _wide(labels: list[Column], figures: list[Column]) -> int:
    """Terminal cells of columns side by side."""
    return sum(_width(column) + len(GAP) for column in (*labels, *figures)) - len(GAP)


def _figure(column: Column, cut: bool, brief: bool) -> Column:
    """A column of figures; its name wraps to their width. cut: brackets go below, or away (brief)."""
    name, *values = (cell for [cell] in column)
    if cut:
        values = [re.sub(r" (\(.*\))", "" if brief else r"\n\1", value) for value in values]
    cells = [value.split("\n") for value in values]
    widest = max(cell_len(line) for cell in cells for line in cell)
    width = max(widest, *map(len, name.split()), 1)
    return [textwrap.wrap(name, width, break_long_words=False) or [""], *cells]


def _narrowed(labels: list[Column], room: int) -> list[Column]:
    """The labels, wrapped to LABEL cells; the widest one is narrowed until all fit into `room`."""
    widths = [_width([_wrapped(cell[0], LABEL) for cell in label]) for label in labels]
    while sum(widths) > max(room, len(labels)):
        widths[widths.index(max(widths))] -= 1
    return [
        [[_cut(line, most) for line in _wrapped(cell[0], min(most, LABEL))] for cell in label]
        for label, most in zip(labels, widths, strict=True)
    ]


def _wrapped(label: str, width: int) -> list[str]:
    """Lines of a label, broken at spaces and after the marks in a tree's name.

    A part wider than `width` breaks after its hyphens too.
    """
    lines = [""]
    for part in re.findall(r"[^\s,:@/]+[\s,:@/]*|[\s,:@/]+", label):
        fits = cell_len(part.rstrip()) <= width
        for piece in [part] if fits else re.findall(r"[^-]+-*|-+", part):
            if lines[-1] and cell_len((lines[-1] + piece).rstrip()) > width:
                lines.append("")
            lines[-1] += piece
    return [line.strip() for line in lines]


def _cut(line: str, width: int) -> str:
    """A line of at most `width` cells, with … for what is cut."""
    return line if cell_len(line) <= width else set_cell_size(line, width - 1) + "…"


def _item(text: str, width: int) -> str:
    """A list item of Markdown, wrapped between words."""
    wrapper = textwrap.TextWrapper(width, "- ", "  ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.fill(printable(text))


def printable(text: str) -> str:
    """The text on one line, without control codes: names of files and categories may hold any."""
    return one_line("".join(" " if c.isspace() else c for c in text))
