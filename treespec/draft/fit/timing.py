"""Seconds of steps, timed in interleaved rounds.

Other work on the machine only adds time, so a step's cost is the lower quartile over rounds.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Act = Callable[[], object]
Step = tuple[Act, Act]  # the act before it, as in decoding (it warms the caches), and the timed one

ROUNDS, FEWEST, SECONDS = 12, 4, 10.0  # rounds; after SECONDS they stop, but not before FEWEST


def fast_times(
    steps: Sequence[Step], device: torch.device, rounds: int = ROUNDS, fewest: int = FEWEST
) -> list[float]:
    """Seconds of each step, over interleaved rounds after one for warming up."""
    rounds_of: list[list[float]] = [[] for _ in steps]
    begun = time.perf_counter()
    for done in range(rounds + 1):
        if done > fewest and time.perf_counter() - begun > SECONDS:
            break
        for (before, step), own in zip(steps, rounds_of, strict=True):
            before()
            synchronize(device)
            started = time.perf_counter()
            step()
            synchronize(device)
            own.append(time.perf_counter() - started)
    return [statistics.quantiles(own[1:], n=4, method="inclusive")[0] for own in rounds_of]


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
