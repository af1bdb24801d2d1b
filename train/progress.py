"""The time of a run: what it says of its phases without steps, how long they may take, and the clock of its steps."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar, final

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

Item = TypeVar("Item")
FIRST_LINE_SECONDS = 10.0
LINE_SECONDS = 30.0
END_SHARE = 0.1  # of a run's time, for validation and calibration at its end
MIN_END_SECONDS = 30.0


@final
class PhaseProgress:
    """Prints how far a phase is: after ten seconds, and every thirty from then on.

    Args:
        accelerator: the processes; the main one prints.
        text: what the phase does, such as "storing features".
        total: the number of its parts.
        unit: what the parts are. Default: conversations.
    """

    def __init__(
        self, accelerator: Accelerator, text: str, total: int, unit: str = "conversations"
    ) -> None:
        self.accelerator = accelerator
        self.text = text
        self.total = total
        self.unit = unit
        self.started = time.monotonic()
        self.next_line = self.started + FIRST_LINE_SECONDS

    def update(self, done: int) -> None:
        """Print a line if it is time for one. done: the number of finished parts, at least 1."""
        now = time.monotonic()
        if now < self.next_line:
            return
        self.next_line = now + LINE_SECONDS
        remaining = (now - self.started) / done * (self.total - done)
        self.accelerator.print(
            f"{self.text}: {done:,} of {self.total:,} {self.unit}, about {format_seconds(remaining)} left"
        )

    def follow(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items, each a part of the phase, and print lines."""
        for done, item in enumerate(items, start=1):
            yield item
            self.update(done)


@final
class SharedTimer:
    """Seconds of training by the main process's clock. With separate clocks, processes could decide differently.

    earlier_seconds: seconds of training before this start of the program.
    """

    def __init__(self, accelerator: Accelerator, earlier_seconds: float) -> None:
        self.device = accelerator.device
        self.started = time.perf_counter() - earlier_seconds

    def elapsed(self) -> float:
        """The seconds so far. All processes must call it."""
        seconds = torch.tensor(
            time.perf_counter() - self.started, dtype=torch.float32, device=self.device
        )
        return float(broadcast(seconds))


@final
class TimeLimit:
    """The time that the end of a run, or a validation, may take. Each phase may use it up to a share.

    Args:
        run_seconds: the seconds of the run so far.
        seconds: the time; default: a tenth of the run's, at least half a minute.
        accelerator: the processes, which go by the main one's clock; default: each goes by its own.
    """

    def __init__(
        self,
        run_seconds: float,
        seconds: float | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.started = time.monotonic()
        self.seconds = max(MIN_END_SECONDS, END_SHARE * run_seconds)
        if seconds is not None:
            self.seconds = seconds

    def is_over(self, share: float) -> bool:
        """Whether a share of the time has passed. All processes must call it, if they go by one clock."""
        is_over = time.monotonic() > self.started + share * self.seconds
        if self.accelerator is None:
            return is_over
        decision = torch.tensor(float(is_over), dtype=torch.float32, device=self.accelerator.device)
        return bool(broadcast(decision) > 0)

    def count_remaining(self) -> float:
        """The seconds that are left, at least 0."""
        return max(0.0, self.started + self.seconds - time.monotonic())


def format_seconds(seconds: float) -> str:
    """Format a duration for people: `40 s`, `2.5 min` or `3.1 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
