"""What a run tells of its steps: metrics.jsonl, the tracker and the bar get the same means.

Each line is over the steps since the line before, and over all processes.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO, final

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor

from treespec.errors import InputError
from treespec.files.atomic import write_text
from treespec.train.loop.schedule import Clock
from treespec.train.losses.teacher import Loss

EVERY = 20  # steps between lines, or
SECONDS = 30.0  # where steps are slow; also between lines of progress where there is no terminal


@final
class Averages:
    """Collects losses on their device; `take` alone waits for them."""

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, losses: list[Loss]) -> None:
        """losses: of one step, without gradients. A part may be new: a later draft step."""
        for loss in losses:
            for name, value in ({"total": loss.total} | loss.parts).items():
                self.values[name].append(value)

    def take(self, accelerator: Accelerator) -> dict[str, float]:
        """The means by name, and begin again. All processes call it at the same step."""
        if not self.values:
            return {}
        means = torch.stack([torch.stack(values).mean() for values in self.values.values()])
        names = list(self.values)
        self.values.clear()
        values = accelerator.reduce(means.to(accelerator.device), reduction="mean").tolist()
        return {name: round(value, 5) for name, value in zip(names, values, strict=True)}


@final
class Meter:
    """A context, which opens and closes bar and file; of the processes the main one alone speaks.

    folder: OUT/training. first, seconds: the step that the run goes on from, and its training until
    then. Lines of later steps are cut: those steps run again.
    """

    def __init__(
        self, accelerator: Accelerator, folder: Path, clock: Clock, first: int, seconds: float
    ) -> None:
        self.accelerator, self.clock = accelerator, clock
        self.path, self.first = folder / "metrics.jsonl", first
        self.averages, self.tokens, self.since = Averages(), 0, seconds
        self.file: TextIO | None = None
        console, speaks = Console(), accelerator.is_main_process
        self.lines = speaks and not console.is_terminal
        self.last = time.monotonic()
        columns = (TextColumn("train"), BarColumn(), MofNCompleteColumn())
        said = TextColumn("{task.fields[said]}")
        self.bar = Progress(*columns, said, console=console, disable=not speaks or self.lines)
        self.task = self.bar.add_task("train", total=clock.total, completed=first, said="")

    def __enter__(self) -> "Meter":
        if self.accelerator.is_main_process:
            lines = lines_until(self.path, self.first)
            write_text(self.path, "".join(f"{line}\n" for line in lines))
            self.file = self.path.open("a", encoding="utf-8")
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        if self.file:
            with suppress(OSError):  # what a full disk did not take is in its buffer still
                self.file.close()

    def count(self, losses: list[Loss], tokens: int) -> None:
        """A step. losses: of this process, none of a skipped step. tokens: of all processes."""
        self.averages.add(losses)
        self.tokens += tokens

    def due(self, step: int, seconds: float) -> bool:
        """Whether it is time for a line."""
        return step % EVERY == 0 or seconds > self.since + SECONDS

    def tell(self, step: int, seconds: float, rate: float) -> None:
        """A line after step `step`, if there were good ones. All processes call it."""
        # 1. The means, on the bar or now and then in a line.
        losses = self.averages.take(self.accelerator)
        if not losses:
            return
        speed = self.tokens / max(seconds - self.since, 1e-9)
        self.tokens, self.since = 0, seconds
        behind = max(self.clock.behind(step, seconds), 1e-9)
        minutes, left = divmod(round(seconds / behind - seconds), 60)
        said = f"loss {losses['total']:.3f}  {speed:,.0f} tokens/s  {minutes}:{left:02d} left"
        self.bar.update(self.task, completed=step, said=said)
        if self.lines and time.monotonic() - self.last >= SECONDS:
            self.last = time.monotonic()
            print(f"step {step}: {said}", flush=True)

        # 2. The line of the file and the tracker.
        line = losses | {
            "learning_rate": rate,
            "seconds": round(seconds, 2),
            "tokens_per_second": round(speed, 1),
            "memory_gib": memory(),
        }
        self.write({"step": step, **line})
        self.accelerator.log(line, step=step)

    def write(self, line: Mapping[str, object]) -> None:
        """Append to metrics.jsonl. Raises InputError where there is no room."""
        try:
            if self.file:
                print(json.dumps(line), file=self.file, flush=True)
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from error


def lines_until(path: Path, last: int) -> list[str]:
    """The lines of metrics.jsonl up to step `last`, without what a kill left half-written."""
    kept = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines():
        with suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= last:
                kept.append(line)
    return kept


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
