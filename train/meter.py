"""What a run tells of its steps: metrics.jsonl, the tracker and the bar get the same means.

Each line is over the steps since the line before, and over all processes.
"""

import sys
from typing import final

import torch

from treespec.train.averages import Averages
from treespec.train.clock import Clock
from treespec.train.loss import Loss
from treespec.train.progress import Report
from treespec.train.running import Run

EVERY = 20  # steps between lines, or
SECONDS = 30.0  # where steps are slow


@final
class Meter:
    """seconds: of training before the first step."""

    def __init__(self, run: Run, report: Report, clock: Clock, seconds: float) -> None:
        self.run, self.report, self.clock = run, report, clock
        self.averages, self.tokens, self.since = Averages(), 0, seconds

    def count(self, losses: list[Loss], tokens: int) -> None:
        """A step. losses: of this process, none of a skipped step. tokens: of all processes."""
        self.averages.add(losses)
        self.tokens += tokens

    def due(self, step: int, seconds: float) -> bool:
        """Whether it is time for a line."""
        return step % EVERY == 0 or seconds > self.since + SECONDS

    def tell(self, step: int, seconds: float, rate: float) -> None:
        """A line after step `step`, if there were good ones. All processes call it."""
        losses = self.averages.take(self.run.accelerator)
        if not losses:
            return
        speed = self.tokens / max(seconds - self.since, 1e-9)
        self.tokens, self.since = 0, seconds
        behind = max(self.clock.behind(step, seconds), 1e-9)
        self.report.step(step, losses["total"], speed, seconds / behind - seconds)
        line = losses | {
            "learning_rate": rate,
            "seconds": round(seconds, 2),
            "tokens_per_second": round(speed, 1),
            "memory_gib": memory(),
        }
        self.report.write({"step": step, **line})
        self.run.accelerator.log(line, step=step)


def memory() -> float:
    """GiB: the most that torch held on the GPU so far, or the process in main memory."""
    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 2**30, 3)
    try:
        import resource
    except ImportError:  # not on Windows
        return 0.0
    unit = 1 if sys.platform == "darwin" else 2**10  # bytes
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30, 3)
