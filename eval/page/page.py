"""OUT/report.html: charts, tables and trees in one file that loads nothing from elsewhere.

Jinja escapes whatever it fills in, so that no model's text and no name becomes markup.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from treespec.eval.page.charts import Chart, Grid
from treespec.eval.page.picture import expected, picture
from treespec.eval.page.trees import Trees
from treespec.eval.report import Report, Table, printable
from treespec.files.atomic import write_text
from treespec.requests.events import explained, visible
from treespec.text.printable import printable as shown

FILE = "report.html"


@dataclass(frozen=True)
class Page:
    """report: tables, notes and verdict. setup: (what, value). trees: None where none was recorded."""

    title: str
    subtitle: str
    report: Report
    charts: Sequence[Chart | Grid]
    setup: Sequence[tuple[str, str]]
    trees: Trees | None


def write_page(out: Path, page: Page) -> None:
    write_text(out / FILE, rendered(page))


def rendered(page: Page) -> str:
    """The page as HTML."""
    environment = Environment(
        loader=PackageLoader("treespec.eval.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"visible": visible, "shown": shown, "line": printable}
    environment.filters["breaks"] = lambda text: text.replace("\n", "↵\n")
    functions: dict[str, Any] = {"picture": picture, "explained": explained, "expected": expected}
    functions["without_empty_columns"] = without_empty_columns
    return environment.get_template("page.html").render(page=page, **functions)


def without_empty_columns(table: Table) -> Table:
    """A table whose every column has a text in some row."""
    labels, columns = list(table.labels), list(table.columns)
    kept = [any(row[place] for row in table.rows) for place in range(len(labels) + len(columns))]
    rows = [list(compress(row, kept)) for row in table.rows]
    kept_labels = list(compress(labels, kept))
    return Table(table.title, kept_labels, list(compress(columns, kept[len(labels) :])), rows)
