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
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    from treespec.eval.run import Step
    from treespec.eval.run import evaluate as run
    from treespec.eval.table import markdown, show

    console = Console()
    if console.is_terminal:
        doing = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
        columns = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), doing)
        with Progress(*columns, console=console, expand=True) as progress:
            task = progress.add_task("", total=None)

            def report(step: Step) -> None:
                progress.update(task, description=step.text, completed=step.done, total=step.total)

            summary = run(config, report)
        show(summary, console)
    else:
        summary = run(config, lambda s: print(f"{s.done}/{s.total} {s.text}", flush=True))
        print(markdown(summary))
    for problem in summary["left_out"]:
        print(f"left out: {problem}")
    print(f"Answers and summary are in {Path(config.out).resolve()}")
