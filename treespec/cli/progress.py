"""Work that reports its steps: a bar on a terminal, plain lines through a pipe."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

    from treespec.eval.run import Step

Result = TypeVar("Result")


def with_progress(console: "Console", work: Callable[[Callable[["Step"], None]], Result]) -> Result:
    """What `work(report)` returns, with every step it reports shown."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    if not console.is_terminal:
        return work(lambda step: print(f"{step.done}/{step.total} {step.text}", flush=True))
    doing = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
    columns = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), doing)
    with Progress(*columns, console=console, expand=True) as progress:
        task = progress.add_task("", total=None)
        return work(lambda s: progress.update(task, description=s.text, completed=s.done, total=s.total))
