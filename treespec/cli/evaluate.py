"""`treespec eval`: acceptance length, speed and right answers on questions, next to other programs."""

import sys
from pathlib import Path

from treespec.cli.early import begin, check_questions, check_there
from treespec.cli.options import takes
from treespec.cli.terminal import notice
from treespec.eval.config import EvalConfig, categories_of, check_kept, drafters_of
from treespec.files.atomic import check_folder


@takes(EvalConfig)
def evaluate(config: EvalConfig) -> None:
    """Measure acceptance length and speedup on questions. The same command resumes a killed run."""
    measure(config)


def measure(config: EvalConfig) -> None:
    """Evaluate, then show tables and verdict; of several processes the first one shows them."""
    # 1. What can be refused before torch loads.
    from treespec.eval.contestants import contestants, pairs
    from treespec.eval.ledger import FILE

    check_folder(config.out)
    check_kept(config)
    contestants(config)
    check_questions(config.questions, categories_of(config))
    if config.run_code:
        print(
            "--run-code runs what the target writes on this machine, in a process with limits on "
            "time, memory and files: no sandbox against malice",
            file=sys.stderr,
        )
    if (Path(config.out) / FILE).exists():  # a finished evaluation needs no models
        notice(f"reading {config.out} …")
    else:
        begin(config, [drafter for drafter, _ in drafters_of(config)], chats=True)
        if config.assistant is not None:
            check_there(config.assistant, "assistant directory")
        if len(drafters_of(config)) == 1:  # unfit ones of several are left out later
            pairs(config, files=True)

    # 2. Measure and show.
    from treespec.cli.terminal import remark, show_result, with_progress
    from treespec.eval.run import evaluate as run
    from treespec.eval.tables import report_of

    summary = with_progress(lambda report: run(config, report))
    if summary is not None:
        remark(*(f"left out: {problem}" for problem in summary["left_out"]))
        show_result(report_of(summary))
        remark(f"Ledger and report are in {Path(config.out).resolve()}; look at report.html there")
