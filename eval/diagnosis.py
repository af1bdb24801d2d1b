"""Write what `treespec doctor` found: a page, and the JSON that it can be made from again."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from treespec.eval.config import DoctorConfig
from treespec.eval.header import build_header, get_today
from treespec.eval.page import write_page
from treespec.eval.report import EvalPage, EvalReport, Table
from treespec.files.atomic import write_json


def write_diagnosis(
    config: DoctorConfig, environment: Mapping[str, object], completions: int, report: EvalReport
) -> EvalPage:
    """Write OUT, a page of HTML, and its JSON beside it.

    Args:
        config: the options of `treespec doctor`.
        environment: device and versions.
        completions: how many completions the head was measured on.
        report: tables, notes and verdict.

    Returns:
        The page.
    """
    result = {
        "config": asdict(config),
        "environment": environment,
        "date": get_today(),
        "completions": completions,
        "report": asdict(report),
    }
    out = Path(config.out)
    page = build_doctor_page(result)
    write_json(out.with_name(out.name.removesuffix(".html") + ".json"), result)
    write_page(page, out)
    return page


def build_doctor_page(result: Mapping[str, Any]) -> EvalPage:
    """Make the page of a diagnosis from its JSON."""
    report = result["report"]
    tables = [Table(**table) for table in report["tables"]]
    header = build_header(
        "doctor",
        DoctorConfig,
        result["config"],
        result["environment"],
        result["completions"],
        result["date"],
    )
    return EvalPage("Head doctor", header, EvalReport(tables, report["notes"], report["verdict"]))
