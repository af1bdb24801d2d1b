"""Make the pages of a finished run again, from the results that lie in it; no model is needed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from treespec.errors import InputError
from treespec.eval.acceptance.table import build_acceptance_page, build_tau_page
from treespec.eval.certify.table import build_certificate_page
from treespec.eval.diagnosis import build_doctor_page
from treespec.eval.exports import format_page_csv, format_page_latex
from treespec.eval.ledger import LEDGER_FILE, Ledger
from treespec.eval.page import write_page
from treespec.eval.report import EvalPage, render_markdown
from treespec.eval.tables import build_eval_page, write_report
from treespec.files.atomic import read_json

PAGE_FORMATS: dict[str, Callable[[EvalPage], str]] = {
    "markdown": lambda page: render_markdown(page.report, header=page.header),
    "latex": format_page_latex,
    "csv": format_page_csv,
}


@dataclass(frozen=True)
class RunKind:
    """A kind of results that a command leaves in a JSON file.

    Attributes:
        field: a field that only these results have.
        build: makes their page.
    """

    field: str
    build: Callable[..., EvalPage]


RUN_KINDS = (
    RunKind("sweeps", build_acceptance_page),
    RunKind("rows", build_tau_page),
    RunKind("tests", build_certificate_page),
    RunKind("completions", build_doctor_page),
)
RESULT_FILES = ("tau.json", "acceptance.json", "certificate.json", "doctor.json")  # in a folder


def rebuild_pages(run: Path) -> list[tuple[Path, EvalPage]]:
    """Make the pages of a run again, with the CSV and SVG of their tables and plots.

    Args:
        run: the `--out` of `treespec eval`, `tau` or `acceptance`, or the JSON file of `certify` or `doctor`.

    Returns:
        Each page and its file.

    Raises:
        InputError: there are no results, or they cannot be read.
    """
    pages = []
    if run.name == LEDGER_FILE:
        run = run.parent
    if run.is_file():
        pages.append(rebuild_page(run))
    elif (run / LEDGER_FILE).exists():
        summary = write_report(Ledger(run), run)
        pages.append((run / "report.html", build_eval_page(summary)))
    for name in RESULT_FILES:
        if (run / name).is_file():
            pages.append(rebuild_page(run / name))
    if not pages:
        raise InputError(
            f"{run} has no results: give the --out of eval, tau or acceptance, or the JSON file of certify or doctor"
        )
    return pages


def rebuild_page(file: Path) -> tuple[Path, EvalPage]:
    """Make the page of a JSON file of results again. Returns the page's file, and the page."""
    results = read_json(file, "give the JSON file of a run")
    for kind in RUN_KINDS:
        if "config" in results and kind.field in results:
            page = kind.build(results)
            html = file.with_name(file.name.removesuffix(".json") + ".html")
            write_page(page, html)
            return html, page
    raise InputError(f"{file} holds no results of eval, tau, acceptance, certify or doctor")
