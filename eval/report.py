"""Results for people: tables, notes and a verdict, for a terminal or as a file of Markdown."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
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
    rows: list[list[str]]
    brief: bool = False

    @property
    def filled(self) -> tuple[list[list[str]], list[list[str]]]:
        """(labels, figures): the texts of each column, its name first; without empty ones."""
        columns = [list(map(printable, column)) for column in zip(*self.rows, strict=True)]
        named = [
            [printable(name), *cells]
            for name, cells in zip([*self.labels, *self.columns], columns, strict=True)
        ]
        count = len(self.labels)
        labels, figures = named[:count], named[count:]
        return [c for c in labels if any(c[1:])], [c for c in figures if any(c[1:])]


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
    labels, figures = (
        [[[cell.replace("|", "\\|")] for cell in c] for c in part] for part in table.filled
    )
    rules = [["-" * (_width(c) + 2)] for c in labels] + [
        ["-" * (_width(c) + 1) + ":"] for c in figures
    ]
    lines = [f"| {' | '.join(cells)} |" for cells in _rows(labels, figures)]
    return [lines[0], f"|{'|'.join(rule for (rule,) in rules)}|", *lines[1:]]


def terminal_lines(table: Table, width: int) -> list[str]:
    """The table, split between columns into pieces of at most `width` cells; labels are repeated.

    Of four layouts (figures on one line or two, labels whole or narrowed) it is the first that fits
    in the fewest pieces.
    """
    # 1. The pieces of each layout.
    packed: list[list[tuple[list[Column], list[Column]]]] = []
    for cut, narrow in product((False, True), (False, True)):
        labels = [[[cell] for cell in column] for column in table.filled[0]]
        figures = [_figure(column, cut, table.brief) for column in table.filled[1]]
        if narrow:
            room = width - max(map(_width, figures), default=0) - len(GAP) * len(labels)
            labels = _narrowed(labels, room)
        pieces: list[tuple[list[Column], list[Column]]] = [(labels, [])]
        for figure in figures:
            if pieces[-1][1] and _wide(labels, [*pieces[-1][1], figure]) > width:
                pieces.append((labels, []))
            pieces[-1][1].append(figure)
        packed.append(pieces)

    # 2. The best of them: a rule below the heads, an empty line between pieces.
    best = min(packed, key=lambda pieces: (max(_wide(*p) for p in pieces) > width, len(pieces)))
    lines: list[str] = []
    for labels, figures in best:
        rule = GAP.join("─" * _width(column) for column in (*labels, *figures))
        drawn = [GAP.join(cells).rstrip() for cells in _rows(labels, figures)]
        height = max(len(column[0]) for column in (*labels, *figures))
        lines += [""] if lines else []
        lines += [*drawn[:height], rule, *drawn[height:]]
    return lines


def _rows(labels: list[Column], figures: list[Column]) -> list[list[str]]:
    """The padded cells of every line: labels to the left, figures to the right, heads to the bottom."""
    height = max(len(column[0]) for column in (*labels, *figures))
    columns = [[[""] * (height - len(head)) + head, *cells] for head, *cells in (*labels, *figures)]
    lines = []
    for row in zip(*columns, strict=True):
        for parts in zip_longest(*row, fillvalue=""):
            space = [" " * (_width(c) - cell_len(p)) for c, p in zip(columns, parts, strict=True)]
            lines.append(
                [
                    part + gap if number < len(labels) else gap + part
                    for number, (part, gap) in enumerate(zip(parts, space, strict=True))
                ]
            )
    return lines


def _width(column: Column) -> int:
    """Terminal cells of its widest line."""
    return max(cell_len(line) for cell in column for line in cell or [""])


def _wide(labels: list[Column], figures: list[Column]) -> int:
    """Terminal cells of columns side by side."""
    return sum(_width(column) + len(GAP) for column in (*labels, *figures)) - len(GAP)


def _figure(texts: list[str], cut: bool, brief: bool) -> Column:
    """A column of figures; its name wraps to their width. cut: brackets go below, or away (brief)."""
    name, *values = texts
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
