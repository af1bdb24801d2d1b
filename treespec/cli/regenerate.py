"""`treespec regenerate`: the target writes the answers that a head learns from."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from treespec.cli.early import begin_answers, check_data
from treespec.cli.options import takes
from treespec.cli.terminal import end_notice, remark, with_progress
from treespec.files.atomic import check_folder
from treespec.text.strings import one_line
from treespec.train.regenerate.config import RegenerateConfig

if TYPE_CHECKING:
    from treespec.eval.common import Step
    from treespec.train.regenerate.run import Result

LINE_EVERY = 30.0  # seconds between lines where there is no terminal


@takes(RegenerateConfig)
def regenerate(config: RegenerateConfig) -> None:
    """Let the target answer questions: a head learns most from the target's own words.

    Run it again after a kill and it goes on. Then: treespec train --data OUT/conversations.jsonl
    """
    check(config)
    try:
        result = with_progress(lambda report: regenerated(config, report))
    except KeyboardInterrupt:
        print(f"\nStopped. The same command goes on; what is there lies in {config.out}.")
        raise typer.Exit(130) from None
    print(result)


def check(config: RegenerateConfig) -> None:
    """What needs no weights to tell. Raises InputError, TreeError."""
    check_folder(config.out)
    if config.data is not None:
        check_data(config.data, answered=False)
    if config.endpoint is None:
        begin_answers(config)


def regenerated(config: RegenerateConfig, report: Callable[["Step"], None]) -> "Result":
    """The work, with its progress: each step on a terminal, a line every LINE_EVERY s elsewhere."""
    from treespec.eval.common import Step
    from treespec.train.regenerate.run import regenerate

    begun, last = False, 0.0

    def on(done: int, total: int, pace: str) -> None:
        nonlocal begun, last
        now = time.monotonic()
        due = not begun or now - last >= LINE_EVERY or done == total
        if due or sys.stderr.isatty():
            begun, last = True, now
            report(Step(done, total, f"conversations{pace}"))

    end_notice()
    return regenerate(config, on, lambda line: remark(one_line(line)))
