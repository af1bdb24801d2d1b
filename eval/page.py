"""Write a page of results: HTML that loads no other file, Markdown, and a CSV and an SVG for each table and plot.

OUT/report.html, OUT/report.md
OUT/report-figures/by-category.csv, by-category.svg, …
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from treespec.eval.charts import (
    build_bars,
    draw_plot,
    draw_table,
    list_figure_columns,
    list_legend,
)
from treespec.eval.exports import format_plot_csv, format_table_csv
from treespec.eval.report import EvalPage, EvalReport, Plot, Table, fill_template, render_markdown
from treespec.files.atomic import write_text

SVG_NAMESPACE = "http://www.w3.org/2000/svg"
GREEK_NAMES = {"τ": "tau", "α": "alpha", "%": "percent"}


@dataclass(frozen=True)
class Exhibit:
    """A table or plot, and the files that are written beside the page.

    Attributes:
        part: the table or plot.
        name: name of its files, without their endings.
        csv: its figures.
        svg: its drawing; "" for a table without figures.
    """

    part: Table | Plot
    name: str
    csv: str
    svg: str

    def link(self, ending: str) -> str:
        """Make a link that holds the file itself, so that the page stays complete when it is sent alone."""
        if ending == "csv":
            return to_data_link("text/csv", self.csv)
        return to_data_link("image/svg+xml", to_file(self.svg))


def write_page(page: EvalPage, file: Path) -> None:
    """Write a page as `file`, its Markdown beside it, and the CSV and SVG of its tables and plots.

    file: its name ends in .html or has no ending.
    """
    stem = file.name.removesuffix(".html")
    folder = file.with_name(f"{stem}-figures")
    write_text(file, render_page(page))
    write_text(file.with_name(f"{stem}.md"), render_markdown(page.report, header=page.header))
    for exhibit in iterate_exhibits(page.report):
        write_text(folder / f"{exhibit.name}.csv", exhibit.csv)
        if exhibit.svg:
            write_text(folder / f"{exhibit.name}.svg", to_file(exhibit.svg))


def render_page(page: EvalPage) -> str:
    """Render a page as HTML."""
    return fill_template(
        "page.html",
        page=page,
        exhibits=list(iterate_exhibits(page.report)),
        is_table=lambda part: isinstance(part, Table),
        build_bars=build_bars,
        list_figure_columns=list_figure_columns,
        list_legend=list_legend,
    )


def iterate_exhibits(report: EvalReport) -> Iterator[Exhibit]:
    """Yield each table with rows, then each plot. A second one of the same title gets a number."""
    names = set[str]()
    parts: list[Table | Plot] = [table for table in report.tables if table.rows]
    parts += report.plots
    for part in parts:
        name = name_file(part.title)
        number = 1
        while name in names:
            number += 1
            name = f"{name_file(part.title)}-{number}"
        names.add(name)
        if isinstance(part, Table):
            yield Exhibit(part, name, format_table_csv(part), draw_table(part))
        else:
            yield Exhibit(part, name, format_plot_csv(part), draw_plot(part))


def name_file(title: str) -> str:
    """Make a file's name from a title: small letters, digits and hyphens."""
    words = title.lower()
    for sign, name in GREEK_NAMES.items():
        words = words.replace(sign, f" {name} ")
    return re.sub(r"[^a-z0-9.]+", "-", words).strip("-.")[:60] or "table"


def to_file(svg: str) -> str:
    """Make an SVG file of a drawing that stands in a page."""
    return svg.replace("<svg ", f'<svg xmlns="{SVG_NAMESPACE}" ', 1)


def to_data_link(kind: str, content: str) -> str:
    """Make a link that holds a file's content."""
    return f"data:{kind};charset=utf-8,{quote(content, safe='')}"
