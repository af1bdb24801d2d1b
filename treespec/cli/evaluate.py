"""`treespec eval`: acceptance length, speed and right answers on questions, next to other programs."""

import sys
from pathlib import Path

from treespec.cli.early import begin, check_questions, check_there
from treespec.cli.options import takes
from treespec.cli.terminal import notice
from treespec.eval.common import listed
from treespec.eval.config import EvalConfig, drafters_of
from treespec.files.atomic import check_folder


@takes(EvalConfig)
def evaluate(config: EvalConfig) -> None:
    """Measure acceptance length and speedup on questions. The same command resumes a killed run."""
    measure(config)


def measure(config: EvalConfig) -> None:
    """Evaluate, then show tables and verdict; of several processes the first one shows them."""
    # 1. What can be refused before torch loads.
    from treespec.eval.contestants import contestants
    from treespec.eval.ledger import FILE

    check_folder(config.out)
    contestants(config)
    check_questions(config.questions, listed("categories", config.categories))
    if config.run_code:
        print(
            "--run-code runs what the target writes on this machine, in a process with limits on "
            "time, memory and files: no sandbox against malice",
            file=sys.stderr,
        )
    if (Path(config.out) / FILE).exists():  # a finished evaluation needs no models
        notice(f"reading {config.out} …")
    else:
        begin(config, [drafter.written for drafter in drafters_of(config)], chats=True)
        if config.assistant is not None:
            check_there(config.assistant, "assistant directory")

    # 2. Measure and show.
    from treespec.cli.terminal import remark, show_result, with_progress
    from treespec.eval.run import evaluate as run
    from treespec.eval.tables import report_of

    summary = with_progress(lambda report: run(config, report))
    if summary is not None:
        remark(*(f"left out: {problem}" for problem in summary["left_out"]))
        show_result(report_of(summary))
        remark(f"Ledger and report are in {Path(config.out).resolve()}; look at report.html there")
