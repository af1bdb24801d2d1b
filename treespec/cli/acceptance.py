"""`treespec acceptance`: acceptance rates of verifiers, beside the optimum."""

from treespec.cli.early import (
    begin,
    check_questions,
    check_readable,
    check_step,
    check_text,
)
from treespec.cli.options import takes
from treespec.cli.terminal import notice
from treespec.eval.acceptance.config import AcceptanceConfig, cases, schemes_in, sweeps
from treespec.files.atomic import check_folder


@takes(AcceptanceConfig)
def acceptance(config: AcceptanceConfig) -> None:
    """Measure the acceptance rates of verifiers on a head's drafts, beside the optimum α*."""
    check_folder(config.out)
    check_readable(laws=config.laws)
    check_text(config.text)
    check_questions(config.questions)
    for sweep in sweeps(config):
        cases(sweep)
        schemes_in(sweep.verifier)
    if config.head and not config.given:
        begin(config, [f"head:{config.head}"])
        check_step(config.head, config.step)
    else:
        notice(f"reading {config.given} …")
    from pathlib import Path

    from treespec.cli.terminal import remark, show_result, with_progress
    from treespec.eval.acceptance.rates import accept
    from treespec.eval.acceptance.table import report_of

    result = with_progress(lambda report: accept(config, report))
    show_result(report_of(result))
    remark(f"Rates are in {Path(config.out).resolve()}; look at acceptance.html there")
