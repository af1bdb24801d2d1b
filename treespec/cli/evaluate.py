"""`treespec eval`: MT-Bench style evaluation of acceptance length and speedup."""

from pathlib import Path

from treespec.cli.early import check_folder, check_sources
from treespec.cli.options import takes
from treespec.cli.terminal import notice
from treespec.eval.mtbench.config import EvalConfig, drafters_of


@takes(EvalConfig)
def evaluate(config: EvalConfig) -> None:
    """Measure acceptance length and speedup on questions; a killed run goes on where it stopped."""
    measure(config)


def measure(config: EvalConfig) -> None:
    """Evaluate, then show tables and verdict."""
    check_folder(config.out)
    if not (Path(config.out) / "config.json").exists():  # one that is finished needs no models
        listed = drafters_of(config) if config.drafter else []
        check_sources(config.target, config.head, tuple(name.partition("@")[0] for name in listed))
    notice(f"loading {config.target} …")
    from treespec.cli.progress import remark, show_result, with_progress
    from treespec.eval.mtbench.run import evaluate as run
    from treespec.eval.mtbench.table import report_of

    summary = with_progress(lambda report: run(config, report))
    remark(*(f"left out: {problem}" for problem in summary["left_out"]))
    show_result(report_of(summary))
    remark(f"Answers and summary are in {Path(config.out).resolve()}")
