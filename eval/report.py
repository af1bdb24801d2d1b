"""Results for people: tables, notes and a verdict, as Markdown and as a page of HTML.

The page is one file that loads nothing from elsewhere. Jinja escapes whatever it fills in, so that no
model's text and no name becomes markup.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from rich.cells import cell_len

from treespec.eval.intervals import Figure
from treespec.files.printable import one_line

Cell = str | Figure | None
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


@dataclass(frozen=True)
class Plot:
    """Lines over one number, which a page draws. lines: by name the (place, figure) of each point, in order."""

    title: str
    along: str
    lines: Mapping[str, Sequence[tuple[float, Figure]]]

    @property
    def ends(self) -> tuple[float, float, float, float]:
        """The least and largest place, and the least and largest value."""
        points = list(chain.from_iterable(self.lines.values()))
        places, values = zip(*((x, y["value"]) for x, y in points), strict=True)
        return min(places), max(places), min(values), max(values)


@dataclass(frozen=True)
class Report:
    """What a command measured. notes: how to read the tables. verdict: what follows from them."""

    tables: Sequence[Table]
    notes: Sequence[str]
    verdict: Sequence[str] = ()
    plots: Sequence[Plot] = ()


def markdown(report: Report, width: int | None = None) -> str:
    """The whole report as Markdown, whose tables have aligned columns in the source too.

    width: of a terminal: a wider table is cut between columns, each part with the labels.
    """
    parts = [
        "\n".join([f"## {shown(table.title)}", *lines])
        for table in report.tables
        if (lines := markdown_lines(table, width))
    ]
    prose = {"": report.notes, "## Verdict\n\n": report.verdict}
    parts += [title + "\n".join(map(item, lines)) for title, lines in prose.items() if lines]
    return "\n\n".join(parts) + "\n"


def markdown_lines(table: Table, width: int | None = None) -> list[str]:
    """The table as lines of Markdown, an empty one first: labels to the left, figures to the right."""
    # 1. Columns whose cells are equally wide.
    aligned: dict[str, list[str]] = {}
    for name, column in table.columns.items():
        cells = [cell.replace("|", "\\|") for cell in column]
        left = name in table.labels
        widest = max(2, *map(cell_len, cells))
        gaps = [" " * (widest - cell_len(cell)) for cell in cells]
        lines = [c + gap if left else gap + c for c, gap in zip(cells, gaps, strict=True)]
        aligned[name] = [lines[0], "-" * (widest - 1) + ("-" if left else ":"), *lines[1:]]

    # 2. As many of them as fit, with the labels.
    labels = [own for name, own in aligned.items() if name in table.labels]
    parts = [[*labels]]
    for name, own in aligned.items():
        if name not in table.labels:
            room = sum(3 + cell_len(lines[0]) for lines in [*parts[-1], own])
            if width and room >= width and len(parts[-1]) > len(labels):
                parts.append([*labels])
            parts[-1].append(own)
    lines = []
    for part in parts:
        rows = [f"| {' | '.join(cells)} |" for cells in zip(*part, strict=True)]
        lines += ["", *rows] if rows else []
    return lines


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


def notes(template: str, **values: Any) -> list[str]:
    """The paragraphs of a filled-in template, each on one line."""
    paragraphs = filled_in(template, **values).split("\n\n")
    return [" ".join(note.split()) for note in paragraphs if note.strip()]


def item(text: str) -> str:
    """A list item of Markdown, wrapped between words."""
    wrapper = textwrap.TextWrapper(PROSE, "- ", "  ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.fill(shown(text))


def percent(figure: Figure) -> Figure:
    """A share in percent."""
    ends: Any = {name: x and 100 * x for name, x in dict[str, Any](figure).items()}
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
    low = cell["low"]
    high = cell["high"]
    digits = 1 if abs(cell["value"]) >= 10 else 2
    limits = "" if low is None or high is None else f" ({low:.{digits}f}–{high:.{digits}f})"
    return f"{cell['value']:.{digits}f}{limits}"
