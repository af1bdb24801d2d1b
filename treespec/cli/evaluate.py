"""`treespec eval`: MT-Bench style evaluation of acceptance length and speedup."""

from treespec.cli.options import takes
from treespec.eval.config import EvalConfig


@takes(EvalConfig)
def evaluate(config: EvalConfig) -> None:
    """Measure acceptance length and speedup on questions; a killed run goes on where it stopped."""
    measure(config)


def measure(config: EvalConfig) -> None:
    """Evaluate with a progress bar, or plain lines through a pipe, then show the tables."""
    from pathlib import Path

    from rich.console import Console

    from treespec.cli.progress import with_progress
    from treespec.eval.run import evaluate as run
    from treespec.eval.table import markdown, show

    console = Console()
    summary = with_progress(console, lambda report: run(config, report))
    if console.is_terminal:
        show(summary, console)
    else:
        print(markdown(summary))
    for problem in summary["left_out"]:
        print(f"left out: {problem}")
    print(f"Answers and summary are in {Path(config.out).resolve()}")
