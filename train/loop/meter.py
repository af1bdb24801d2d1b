"""What a run reports of its steps: metrics.jsonl, the tracker and the terminal get the same means.

Each line is over the steps since the line before, and over all processes.
"""

import json
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TextIO, final

import psutil
import torch
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor

from treespec.errors import InputError
from treespec.files.atomic import write_text
from treespec.train.losses.tokens import Loss

EVERY = 20  # steps between lines, or
SECONDS = 30.0  # where steps are slow; also between lines of progress where there is no terminal


@final
class Meter:
    """A context, which opens and closes the file; of the processes the main one alone speaks.

    path: of metrics.jsonl. first, seconds: the step that the run goes on from, and its training
    until then. Lines of later steps are cut: those steps run again.
    """

    def __init__(self, accelerator: Accelerator, path: Path, first: int, seconds: float) -> None:
        self.accelerator, self.path, self.first = accelerator, path, first
        self.values: dict[str, list[Tensor]] = defaultdict(list)  # on their device
        self.since, self.printed = seconds, time.monotonic()
        self.console = Console(quiet=not accelerator.is_main_process)
        self.status = self.console.status("train")
        self.file: TextIO | None = None

    def __enter__(self) -> "Meter":
        if self.accelerator.is_main_process:
            write_text(self.path, "".join(lines_until(self.path, self.first)))
            self.file = self.path.open("a", encoding="utf-8")
        self.status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.status.stop()
        if self.file:
            with suppress(OSError):  # what a full disk did not take is in its buffer still
                self.file.close()

    def count(self, losses: list[Loss]) -> None:
        """A step. losses: of this process. A part may be new: a later draft step."""
        for loss in losses:
            for name, value in ({"total": loss.total} | loss.parts).items():
                self.values[name].append(value)

    def means(self) -> dict[str, float]:
        """The means by name, and begin again. All processes call it at the same step."""
        if not self.values:
            return {}
        means = torch.stack([torch.stack(values).mean() for values in self.values.values()])
        names = list(self.values)
        self.values.clear()
        values = self.accelerator.reduce(means.to(self.accelerator.device), reduction="mean")
        return {name: round(value, 5) for name, value in zip(names, values.tolist(), strict=True)}

    def due(self, step: int, seconds: float) -> bool:
        """Whether it is time for a line."""
        return step % EVERY == 0 or seconds > self.since + SECONDS

    def line(self, step: int, seconds: float, behind: float, rate: float) -> None:
        """A line after step `step`, if there were good ones. All processes call it.

        behind: the share of the run that is behind. rate: the learning rate.
        """
        forwards = len(self.values.get("total", ())) * self.accelerator.num_processes
        losses = self.means()
        if not forwards:
            return
        speed = losses.pop("tokens") * forwards / max(seconds - self.since, 1e-9)
        self.since = seconds
        left = timedelta(seconds=round(seconds / behind - seconds))
        said = f"step {step}: loss {losses['total']:.3f}, {speed:,.0f} tokens/s, {left} left"
        self.status.update(said)
        if not self.console.is_terminal and time.monotonic() - self.printed >= SECONDS:
            self.printed = time.monotonic()
            self.console.print(said)
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
    for line in text.splitlines(keepends=True):
        with suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= last:
                kept.append(line)
    return kept


def memory() -> float:
    """GiB: the most that torch held on the GPU so far, or what the process holds in main memory."""
    on_gpu = torch.cuda.is_available()
    held = torch.cuda.max_memory_allocated() if on_gpu else psutil.Process().memory_info().rss
    return round(held / 2**30, 3)
