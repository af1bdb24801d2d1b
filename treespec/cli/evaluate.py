"""`treespec eval`: MT-Bench style evaluation of acceptance length and speedup."""

import sys
from pathlib import Path

from treespec.cli.early import begin, check_folder, check_questions
from treespec.cli.options import takes
from treespec.cli.terminal import notice
from treespec.eval.mtbench.config import (
    EvalConfig,
    categories_of,
    check_kept,
    configurations,
    drafters_of,
    pairs_of,
)


@takes(EvalConfig)
def evaluate(config: EvalConfig) -> None:
    """Measure acceptance length and speedup on questions. The same command resumes a killed run."""
    measure(config)


def measure(config: EvalConfig) -> None:
    """Evaluate, then show tables and verdict."""
    check_folder(config.out)
    check_kept(config)
    configurations(config)
    check_questions(config.questions, categories_of(config))
    if config.run_code:
        warn_of_code()
    if (Path(config.out) / "config.json").exists():  # a finished evaluation needs no models
        notice(f"reading {config.out} …")
    else:
        begin(config, drafters_of(config), chats=True)
        from treespec.eval.pairs import refuse_unfit

        refuse_unfit(pairs_of(config)[0], config.allow_lossy)
    from treespec.cli.progress import remark, show_result, with_progress
    from treespec.eval.mtbench.run import evaluate as run
    from treespec.eval.mtbench.table import report_of

    summary = with_progress(lambda report: run(config, report))
    remark(*(f"left out: {problem}" for problem in summary["left_out"]))
    show_result(report_of(summary))
    remark(f"Answers and summary are in {Path(config.out).resolve()}; look at report.html there")


def warn_of_code() -> None:
    """Say what --run-code does."""
    print(
        "--run-code runs what the target writes on this machine, in a process with limits on time, "
        "memory and files: no sandbox against malice",
        file=sys.stderr,
    )
