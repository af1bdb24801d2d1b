"""Ctrl-C and SIGTERM during the steps of a run: it stops after the step that it computes, and saves that step."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import final

import torch
from accelerate import Accelerator

from treespec.files.signals import handling_stop_signals
from treespec.train.checkpoints import find_latest_step
from treespec.train.config import TrainConfig
from treespec.train.data.features import SHARD_NAMES

# A launcher of several processes passes on the Ctrl-C that the terminal has sent to each of them already.
SAME_SIGNAL_SECONDS = 1.0
STOPPING_LINE = b"\nStopping after this step, which is then saved; Ctrl-C again stops at once.\n"


@final
class StopRequest:
    """Whether somebody wants the run to stop. A second signal raises KeyboardInterrupt at once.

    accelerator: the processes.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.signalled_at: float | None = None
        self.is_interruptible = False

    @property
    def is_signalled(self) -> bool:
        """Whether this process has had a signal."""
        return self.signalled_at is not None

    def is_requested(self) -> bool:
        """Whether any process has had a signal. All processes must call it."""
        if self.accelerator.num_processes == 1:
            return self.is_signalled
        signalled = torch.tensor(
            float(self.is_signalled), dtype=torch.float32, device=self.accelerator.device
        )
        return bool(self.accelerator.reduce(signalled, reduction="sum") > 0)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: note the first one, and raise KeyboardInterrupt for the second."""
        now = time.monotonic()
        if self.signalled_at is None:
            self.signalled_at = now
            if self.is_interruptible:
                raise KeyboardInterrupt
            if self.accelerator.is_main_process:
                # A handler must not print: the signal may have come amid another print.
                with suppress(OSError):
                    os.write(2, STOPPING_LINE)
        elif now > self.signalled_at + SAME_SIGNAL_SECONDS:
            raise KeyboardInterrupt

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """In this block, which changes nothing that is saved, the first signal ends the block."""
        self.is_interruptible = True
        try:
            yield
        except KeyboardInterrupt:
            if not self.is_signalled:
                raise
        finally:
            self.is_interruptible = False


@contextmanager
def stopping_between_steps(accelerator: Accelerator) -> Iterator[StopRequest]:
    """In this block Ctrl-C and SIGTERM are noted instead of ending the process amid a step."""
    request = StopRequest(accelerator)
    with handling_stop_signals(request.receive):
        yield request


def describe_stopped_run(config: TrainConfig) -> str:
    """Say where the same command goes on after a run was stopped, by what is on the disk."""
    folders = [config.out]
    if config.has_first_stage and config.first_head:
        folders.append(config.first_head)
    for folder in folders:
        step = find_latest_step(Path(folder) / "training")
        if step is not None:
            return f"The same command goes on from step {step} of {folder}"
    sentence = "No step was saved: the same command begins at step 1"
    if config.features is not None and any(Path(config.features).glob(f"*/{SHARD_NAMES}")):
        sentence += f", and reads the features that are in {config.features}"
    return sentence
