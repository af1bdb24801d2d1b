"""Report the steps of a run: metrics.jsonl, the tracker and the terminal get the same means.

Each line has means over the steps since the last line, and over all processes.
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import final

import torch
from accelerate import Accelerator
from torch import Tensor

from treespec.errors import InputError
from treespec.files.atomic import write_text
from treespec.train.checkpoints import Place
from treespec.train.losses.tokens import Loss
from treespec.train.report import AGREEMENT_PREFIX, write_training_report

LINE_EVERY_STEPS = 20  # steps between lines
# Seconds between lines if steps are slow, and between lines on the terminal.
LINE_EVERY_SECONDS = 30.0
# A random head's is about ten times its --token-weight, and some of the features.
LARGE_LOSS = 1000.0
RISE_FACTOR = 4.0  # of a loss that has risen, over the lowest one so far


@final
class Meter:
    """Collects the losses of steps, and writes their means as lines. Only the main process writes.

    Args:
        accelerator: the processes.
        path: metrics.jsonl. Its lines of steps after `place` are removed, because those steps run again.
        place: the progress of the run.
    """

    def __init__(self, accelerator: Accelerator, path: Path, place: Place) -> None:
        self.accelerator = accelerator
        self.path = path
        self.values: dict[str, list[Tensor]] = defaultdict(list)  # on their device
        self.since = place.seconds
        self.printed = -math.inf
        self.lowest_loss = math.inf
        self.parts = 0  # of the lowest loss
        self.has_commented = False
        if accelerator.is_main_process:
            write_text(path, "".join(iterate_lines_until(path, place.step)))

    def count(self, losses: list[Loss]) -> None:
        """Count a step. losses: this process's. They may have new parts, when a further draft step begins."""
        for total, parts in losses:
            for name, value in ({"total": total} | parts).items():
                self.values[name].append(value)

    def is_due(self, step: int, seconds: float) -> bool:
        """Whether a line is due after this step."""
        slow = seconds > self.since + LINE_EVERY_SECONDS
        return slow or step % LINE_EVERY_STEPS == 0

    def write_line(self, step: int, seconds: float, progress: float, rate: float) -> None:
        """Write a line over the steps since the last line, if any step was not skipped. All processes call it.

        Args:
            step: finished steps.
            seconds: seconds of training so far.
            progress: the share of the run so far, in (0, 1].
            rate: the learning rate.
        """
        # 1. Compute the means.
        if not self.values:
            return
        accelerator = self.accelerator
        forwards = len(self.values["total"]) * accelerator.num_processes
        local_means = torch.stack([torch.stack(values).mean() for values in self.values.values()])
        means = accelerator.reduce(local_means.to(accelerator.device), reduction="mean").tolist()
        line = {name: round(mean, 5) for name, mean in zip(self.values, means, strict=True)}
        speed = line.pop("tokens") * forwards / max(seconds - self.since, 1e-9)
        line |= {
            "learning_rate": rate,
            "seconds": round(seconds, 2),
            "tokens_per_second": round(speed, 1),
        }
        self.values.clear()
        self.since = seconds

        # 2. Report them.
        self.write({"step": step} | line)
        accelerator.log(line, step=step)
        if time.monotonic() >= self.printed + LINE_EVERY_SECONDS:
            self.printed = time.monotonic()
            remaining = timedelta(seconds=round(seconds / progress - seconds))
            agreement = describe_agreement(line)
            accelerator.print(
                f"step {step}: loss {line['total']:,.3f}{agreement}, {speed:,.0f} tokens/s, {remaining} left"
            )
            if accelerator.is_main_process:
                write_training_report(
                    self.path.parent, f"Step {step:,}, {progress:.0%} of the run, {remaining} left"
                )
        self.describe_loss(line["total"], len(line))

    def describe_loss(self, loss: float, parts: int) -> None:
        """Print once what a very large or a rising loss means.

        parts: of the line. Further draft steps, which begin amid a run, bring new ones, and a larger loss.
        """
        if parts > self.parts:
            self.parts = parts
            self.lowest_loss = loss
        self.lowest_loss = min(self.lowest_loss, loss)
        comment = ""
        if loss > LARGE_LOSS:
            comment = (
                "this loss is very large: the head's states are far from the target's. If it does not fall "
                "within a hundred steps, lower --learning-rate"
            )
        elif loss > RISE_FACTOR * self.lowest_loss:
            comment = f"the loss has risen from {self.lowest_loss:,.3f}: lower --learning-rate"
        if comment and not self.has_commented:
            self.has_commented = True
            self.accelerator.print(comment)

    def write(self, line: Mapping[str, object]) -> None:
        """Append a line to metrics.jsonl. Raises InputError if the disk is full."""
        if self.accelerator.is_main_process:
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    print(json.dumps(line), file=file)
            except OSError as error:
                raise InputError(f"cannot write {self.path}: {error.strerror or error}") from error


def describe_agreement(line: Mapping[str, float]) -> str:
    """Describe a line's agreement by draft step, after a comma; "" if it has none."""
    shares: list[str] = []
    while f"{AGREEMENT_PREFIX}{len(shares) + 1}" in line:
        shares.append(f"{line[f'{AGREEMENT_PREFIX}{len(shares) + 1}']:.1%}")
    if not shares:
        return ""
    return f", agreement {' '.join(shares)}"


def iterate_lines_until(path: Path, last: int) -> Iterator[str]:
    """Yield the lines of metrics.jsonl up to step `last`, without a line that a kill left half-written."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines(keepends=True):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):  # half-written
            continue
        if isinstance(step, int) and step <= last:
            yield line
