"""Results for people: tables that fit a terminal, aligned Markdown in a file, notes below, a verdict at the end."""

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
    """labels: names of the first columns, which say what a row is. columns: names of the figures' columns.

    rows: the text of labels and figures; a figure may have a second part in brackets, "1.49 (1.32–1.61)".
    brief: leave the brackets out on a terminal that is too narrow for them.
    """

    title: str
    labels: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    brief: bool = False


@dataclass(frozen=True)
class Report:
    """What a command has measured. notes: how to read the tables. verdict: what follows from them."""

    tables: Sequence[Table]
    notes: Sequence[str]
    verdict: Sequence[str] = ()

    @property
    def filled(self) -> list[Table]:
        """The tables that have rows."""
        return [table for table in self.tables if table.rows]


@dataclass(frozen=True)
class Column:
    head: list[str]
    cells: Cells
    left: bool

    @property
    def width(self) -> int:
        return max(cell_len(line) for cell in (self.head, *self.cells) for line in cell or [""])

    def padded(self, line: str) -> str:
        space = " " * (self.width - cell_len(line))
        return line + space if self.left else space + line


def markdown(report: Report) -> str:
    """Tables with aligned columns, so that the source reads like the page."""
    parts = []
    for table in report.filled:
        parts += [f"## {printable(table.title)}", "\n".join(markdown_lines(table))]
    parts.append("\n".join(_item(note, PROSE) for note in report.notes))
    if report.verdict:
        parts += ["## Verdict", "\n".join(_item(line, PROSE) for line in report.verdict)]
    return "\n\n".join(part for part in parts if part) + "\n"


def show(report: Report, console: "Console") -> None:
    """Print on a terminal: no word or number is broken, tables that are too wide are cut between columns."""

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
    labels, figures = _columns(table, _escaped, _escaped, lambda name, _: _escaped(name))
    columns = [*labels, *figures]
    rule = ["-" * (c.width + 2) if c.left else "-" * (c.width + 1) + ":" for c in columns]
    lines = [f"| {' | '.join(c.padded(c.head[0]) for c in columns)} |", f"|{'|'.join(rule)}|"]
    for i in range(len(table.rows)):
        lines.append(f"| {' | '.join(c.padded(c.cells[i][0]) for c in columns)} |")
    return lines


def terminal_lines(table: Table, width: int) -> list[str]:
    """The table in as few pieces as its columns need, side by side where they fit; labels are repeated."""
    cut = _unbracketed if table.brief else _stacked
    packed = []
    for of_figure in (_whole, cut):
        labels, figures = _columns(table, _whole, of_figure, _head)
        packed.append(_packed(labels, figures, width))
        packed.append(_packed(_narrowed(labels, figures, width), figures, width))
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
    """(columns of labels, columns of figures), without those that are empty throughout."""
    labels, figures = [], []
    for number, name in enumerate([*table.labels, *table.columns]):
        texts = [printable(row[number]) for row in table.rows]
        if not any(texts):
            continue
        if number < len(table.labels):
            labels.append(
                Column(of_label(printable(name)), [of_label(text) for text in texts], left=True)
            )
            continue
        cells = [of_figure(text) for text in texts]
        widest = max(cell_len(line) for cell in cells for line in cell)
        figures.append(Column(of_head(printable(name), widest), cells, left=False))
    return labels, figures


def _packed(labels: list[Column], figures: list[Column], width: int) -> list[list[Column]]:
    """The figures' columns in order, as many in each piece as fit beside the labels; at least one."""
    pieces = [[*labels]]
    for figure in figures:
        if len(pieces[-1]) > len(labels) and _wide([*pieces[-1], figure]) > width:
            pieces.append([*labels])
        pieces[-1].append(figure)
    return pieces


def _wide(columns: list[Column]) -> int:
    return sum(column.width for column in columns) + len(GAP) * (len(columns) - 1)


def _drawn(columns: list[Column]) -> list[str]:
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
    """A cell of Markdown."""
    return [text.replace("|", "\\|")]


def _whole(text: str) -> list[str]:
    return [text]


def _stacked(text: str) -> list[str]:
    """What is in brackets below its value."""
    return text.replace(" (", "\n(").split("\n")


def _head(name: str, widest: int) -> list[str]:
    """The name of a column, its words below each other where they would make the column wider."""
    words = name.split() or [""]
    return textwrap.wrap(name, max(widest, *map(len, words), 1), break_long_words=False) or [""]


def _unbracketed(text: str) -> list[str]:
    return [re.sub(r" \(.*\)", "", text)]


def _narrowed(labels: list[Column], figures: list[Column], width: int) -> list[Column]:
    """The labels wrapped, and so narrow that the widest figure stands beside them."""
    wrapped = [
        replace(label, cells=[_wrapped(cell[0], LABEL) for cell in label.cells]) for label in labels
    ]
    widths = [label.width for label in wrapped]
    room = width - max((figure.width for figure in figures), default=0) - len(GAP) * len(labels)
    while sum(widths) > max(room, len(labels)):
        widths[widths.index(max(widths))] -= 1
    narrow = []
    for label, room in zip(labels, widths, strict=True):
        cells = [
            [_cut(line, room) for line in _wrapped(cell[0], min(room, LABEL))]
            for cell in label.cells
        ]
        narrow.append(Column([_cut(label.head[0], room)], cells, left=True))
    return narrow


def _wrapped(label: str, width: int) -> list[str]:
    """Lines of a label, broken at spaces and after the marks in a tree's name, within a long part after hyphens too."""
    lines = [""]
    for part in re.findall(r"[^\s,:@/]+[\s,:@/]*|[\s,:@/]+", label):
        for piece in (
            [part] if cell_len(part.rstrip()) <= width else re.findall(r"[^-]+-*|-+", part)
        ):
            if lines[-1] and cell_len((lines[-1] + piece).rstrip()) > width:
                lines.append("")
            lines[-1] += piece
    return [line.strip() for line in lines]


def _cut(line: str, width: int) -> str:
    return line if cell_len(line) <= width else set_cell_size(line, width - 1) + "…"


def _item(text: str, width: int) -> str:
    return textwrap.fill(
        printable(text), width, initial_indent="- ", subsequent_indent="  ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def printable(text: str) -> str:
    """In one line: names of files and categories may hold anything, such as codes that move a cursor."""
    return one_line("".join(" " if c.isspace() else c for c in text))
