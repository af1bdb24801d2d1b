"""Results for people: tables, notes and a verdict, for a terminal or as a file of Markdown."""

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size

from treespec.text.printable import one_line

if TYPE_CHECKING:
    from rich.console import Console

GAP = "  "  # between columns
LABEL = 16  # columns of a label that is wrapped, if its parts fit
PROSE = 100  # columns of a note in Markdown

Cells = list[list[str]]  # the lines of each cell


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
    rows: list[list[str]]
    brief: bool = False


@dataclass(frozen=True)
class Report:
    """What a command measured. notes: how to read the tables. verdict: what follows from them."""

    tables: Sequence[Table]
    notes: Sequence[str]
    verdict: Sequence[str] = ()

    @property
    def filled(self) -> list[Table]:
        """The tables that have rows."""
        return [table for table in self.tables if table.rows]


@dataclass(frozen=True)
class Column:
    """One column, wrapped. head, cells: their lines. left: align to the left, else to the right."""

    head: list[str]
    cells: Cells
    left: bool

    @property
    def width(self) -> int:
        """Terminal cells of the widest line."""
        return max(cell_len(line) for cell in (self.head, *self.cells) for line in cell or [""])

    def padded(self, line: str) -> str:
        """A line, filled up with spaces to the width."""
        space = " " * (self.width - cell_len(line))
        return line + space if self.left else space + line


def markdown(report: Report) -> str:
    """The whole report as Markdown, whose tables have aligned columns in the source too."""
    parts = []
    for table in report.filled:
        parts += [f"## {printable(table.title)}", "\n".join(markdown_lines(table))]
    parts.append("\n".join(_item(note, PROSE) for note in report.notes))
    if report.verdict:
        parts += ["## Verdict", "\n".join(_item(line, PROSE) for line in report.verdict)]
    return "\n\n".join(part for part in parts if part) + "\n"


def show(report: Report, console: "Console") -> None:
    """Print on a terminal. No word or number is broken; wide tables are split between columns."""

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)

    for table in report.filled:
        say(f"\n{printable(table.title)}", "bold")
        say("\n".join(terminal_lines(table, console.width)))
    say("")
    for note in report.notes:
        say(_item(note, console.width))
    if report.verdict:
        say("\nVerdict", "bold")
        for line in report.verdict:
            say(_item(line, console.width))


def markdown_lines(table: Table) -> list[str]:
    """The table as lines of Markdown."""
    labels, figures = _columns(table, _escaped, _escaped, lambda name, _: _escaped(name))
    columns = [*labels, *figures]
    rule = ["-" * (c.width + 2) if c.left else "-" * (c.width + 1) + ":" for c in columns]
    lines = [f"| {' | '.join(c.padded(c.head[0]) for c in columns)} |", f"|{'|'.join(rule)}|"]
    for i in range(len(table.rows)):
        lines.append(f"| {' | '.join(c.padded(c.cells[i][0]) for c in columns)} |")
    return lines


def terminal_lines(table: Table, width: int) -> list[str]:
    """The table, split between columns into pieces of at most `width` cells; labels are repeated.

    Of four layouts (labels whole or narrowed, figures on one line or two) it is the first that fits
    in the fewest pieces.
    """
    # 1. The pieces of each layout.
    cut = _unbracketed if table.brief else _stacked
    packed = []
    for of_figure in (_whole, cut):
        labels, figures = _columns(table, _whole, of_figure, _head)
        packed.append(_packed(labels, figures, width))
        packed.append(_packed(_narrowed(labels, figures, width), figures, width))

    # 2. The best of them, with an empty line between pieces.
    pieces = min(packed, key=lambda pieces: (max(map(_wide, pieces)) > width, len(pieces)))
    lines: list[str] = []
    for piece in pieces:
        lines += ["", *_drawn(piece)] if lines else _drawn(piece)
    return lines


def _columns(
    table: Table,
    of_label: Callable[[str], list[str]],
    of_figure: Callable[[str], list[str]],
    of_head: Callable[[str, int], list[str]],
) -> tuple[list[Column], list[Column]]:
    """(columns of labels, columns of figures), without empty ones.

    of_label, of_figure: text of a cell -> its lines. of_head: (name, width of figures) -> lines.
    """
    labels: list[Column] = []
    figures: list[Column] = []
    for number, name in enumerate([*table.labels, *table.columns]):
        # 1. Its cells.
        texts = [printable(row[number]) for row in table.rows]
        if not any(texts):
            continue

        # 2. A label.
        if number < len(table.labels):
            cells = [of_label(text) for text in texts]
            labels.append(Column(of_label(printable(name)), cells, left=True))
            continue

        # 3. A figure, whose name wraps to the width of its cells.
        cells = [of_figure(text) for text in texts]
        widest = max(cell_len(line) for cell in cells for line in cell)
        figures.append(Column(of_head(printable(name), widest), cells, left=False))
    return labels, figures


def _packed(labels: list[Column], figures: list[Column], width: int) -> list[list[Column]]:
    """The columns of figures in order, split into pieces that fit beside the labels.

    A piece has at least one figure.
    """
    pieces = [[*labels]]
    for figure in figures:
        if len(pieces[-1]) > len(labels) and _wide([*pieces[-1], figure]) > width:
            pieces.append([*labels])
        pieces[-1].append(figure)
    return pieces


def _wide(columns: list[Column]) -> int:
    """Terminal cells of the columns side by side."""
    return sum(column.width for column in columns) + len(GAP) * (len(columns) - 1)


def _drawn(columns: list[Column]) -> list[str]:
    """One piece as lines: head, rule, rows."""
    height = max(len(column.head) for column in columns)
    heads = [[""] * (height - len(column.head)) + column.head for column in columns]
    rows = [heads, [["─" * column.width] for column in columns]]
    rows += [[column.cells[i] for column in columns] for i in range(len(columns[0].cells))]
    lines = []
    for row in rows:
        for parts in zip_longest(*row, fillvalue=""):
            cells = (column.padded(part) for column, part in zip(columns, parts, strict=True))
            lines.append(GAP.join(cells).rstrip())
    return lines


def _escaped(text: str) -> list[str]:
    """A cell of Markdown on one line."""
    return [text.replace("|", "\\|")]


def _whole(text: str) -> list[str]:
    """A cell on one line."""
    return [text]


def _stacked(text: str) -> list[str]:
    """A figure on two lines: its value, and the brackets below."""
    return text.replace(" (", "\n(").split("\n")


def _head(name: str, widest: int) -> list[str]:
    """The name of a column, wrapped between words to the width of its figures."""
    words = name.split() or [""]
    return textwrap.wrap(name, max(widest, *map(len, words), 1), break_long_words=False) or [""]


def _unbracketed(text: str) -> list[str]:
    """A figure without its brackets."""
    return [re.sub(r" \(.*\)", "", text)]


def _narrowed(labels: list[Column], figures: list[Column], width: int) -> list[Column]:
    """The labels, wrapped and cut so that the widest figure fits beside them."""
    # 1. The width of each label: wrapped first, then the widest one cell less until all fit.
    wrapped = [replace(c, cells=[_wrapped(cell[0], LABEL) for cell in c.cells]) for c in labels]
    widths = [label.width for label in wrapped]
    room = width - max((figure.width for figure in figures), default=0) - len(GAP) * len(labels)
    while sum(widths) > max(room, len(labels)):
        widths[widths.index(max(widths))] -= 1

    # 2. Columns of these widths.
    narrow = []
    for label, most in zip(labels, widths, strict=True):
        lines = [_wrapped(cell[0], min(most, LABEL)) for cell in label.cells]
        cells = [[_cut(line, most) for line in cell] for cell in lines]
        narrow.append(Column([_cut(label.head[0], most)], cells, left=True))
    return narrow


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
