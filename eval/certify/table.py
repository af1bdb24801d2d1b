"""Make the page of a certificate: what was tested, with what result, and how small a fault would have shown."""

from collections.abc import Mapping
from typing import Any

from treespec.eval.config import CertifyConfig
from treespec.eval.header import NOT_RECORDED, build_header
from treespec.eval.report import Cell, EvalPage, EvalReport, Table

CERTIFICATE_NOTES = (
    "Greedy: every difference from one token at a time must be explained by rounding.",
    "Sampled: a p-value below the error fails the test. All tests together fail a correct decoder with the "
    "probability --error at most.",
    "Shows shifts above: the share of the probability that a fault must move for the test to find it with the "
    "test's power. Smaller faults may stay hidden.",
)


def build_certificate_page(certificate: Mapping[str, Any]) -> EvalPage:
    """Make the page of a certificate, as `treespec certify` writes it."""
    verdict = f"No fault found in {certificate['verifier']}."
    if not certificate["passed"]:
        failed = sum(not test["passed"] for test in certificate["tests"])
        verdict = f"NOT certified: {certificate['verifier']}, {failed} tests failed."
    rows = [make_test_cells(test) for test in certificate["tests"]]
    header = build_header(
        "certify",
        CertifyConfig,
        certificate["config"],
        certificate["environment"],
        None,
        certificate.get("date", NOT_RECORDED),
    )
    report = EvalReport(
        [Table("Tests of losslessness", ["Test"], rows)], CERTIFICATE_NOTES, [verdict]
    )
    return EvalPage("Losslessness certificate", header, report)


def make_test_cells(test: Mapping[str, Any]) -> dict[str, Cell]:
    """Make the table row of a test."""
    cells: dict[str, Cell] = {"Test": test["test"], "result": "FAILED"}
    if test["passed"]:
        cells["result"] = "passed"
    if "different" in test:
        cells["tested"] = f"{test['answers']:,}"
        cells["different"] = str(len(test["different"]))
        return cells
    cells["tested"] = f"{test['samples']:,}"
    cells["p-value"] = f"{test['p_value']:.3g}"
    cells["error"] = f"{test['error']:.2g}"
    if test["finds"] is not None:
        cells["shows shifts above"] = f"{test['finds']:.1%}"
        cells["power"] = f"{test['power']:.0%}"
    return cells
