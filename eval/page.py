"""OUT/report.html: charts, tables and trees in one file that loads nothing from elsewhere.

Jinja escapes whatever it fills in, so that no model's text and no name becomes markup.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from treespec.eval.charts import Chart, charts_of
from treespec.eval.common import drafted_by
from treespec.eval.config import EvalConfig
from treespec.eval.ledger import Ledger
from treespec.eval.notes import name_of
from treespec.eval.picture import expected, picture
from treespec.eval.report import Report, printable
from treespec.eval.summary import Summary
from treespec.options import command_line
from treespec.requests.events import Cycle, explained, visible
from treespec.text.strings import printable as shown


@dataclass(frozen=True)
class Page:
    """report: tables, notes and verdict. setup: (what, value). traced: entries of the ledger, each
    with a `title` and its `temperature`.
    """

    title: str
    subtitle: str
    report: Report
    charts: Sequence[Chart]
    setup: Sequence[tuple[str, str]]
    traced: Sequence[dict[str, Any]]


def page_of(summary: Summary, ledger: Ledger, report: Report) -> Page:
    """Charts over the tables of a report, and the trees of a ledger."""
    # 1. What the figures depend on. Without a GPU the device is the processor.
    options, count = summary["options"], summary["questions"]
    setup = [("command", command_line("eval", EvalConfig, options))]
    setup += [(what, str(value)) for what, value in summary["environment"].items()]
    known = {"", *(value for _, value in setup)}
    setup += [(what, value) for what, value in summary["machine"].items() if value not in known]

    # 2. The latest trace of each pair.
    rows = {row["name"]: row for row in summary["rows"]}
    latest = {entry["contestant"]: entry for entry in ledger.of("traced")}
    traced = []
    for name, row in rows.items():
        if name in latest:
            heat = row["temperature"]
            title = f"{name_of(row, summary['rows'])}, temperature {heat:g}"
            traced.append(latest[name] | {"title": title, "temperature": heat})
    return Page(
        title=f"{PurePath(options['target']).name}: acceptance and speed",
        subtitle=f"{drafted_by(options)}, {count} {'question' if count == 1 else 'questions'} of "
        f"{options['questions']}",
        report=report,
        charts=charts_of(summary),
        setup=setup,
        traced=traced,
    )


def rendered(page: Page) -> str:
    """The page as HTML."""
    environment = Environment(
        loader=PackageLoader("treespec.eval", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"visible": visible, "shown": shown, "line": printable}
    environment.filters["breaks"] = lambda text: text.replace("\n", "↵\n")
    environment.filters["cycle"] = Cycle.from_json
    functions: dict[str, Any] = {"picture": picture, "explained": explained, "expected": expected}
    return environment.get_template("page.html").render(page=page, **functions)
