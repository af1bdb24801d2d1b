"""Seconds of steps, timed in interleaved rounds, and kept unless the machine was busy.

Other work on the machine only adds time, so a step's cost is the lower quartile over rounds.
"""

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from treespec.errors import InputError
from treespec.files.atomic import remove_leftovers, write_json

log = logging.getLogger(__name__)

Act = Callable[[], object]
Step = tuple[Act, Act]  # the act before it, as in decoding (it warms the caches), and the timed one

ROUNDS, FEWEST, SECONDS = 12, 4, 10.0  # rounds; after SECONDS they stop, but not before FEWEST
SHARE, LEAST = (
    0.2,
    0.5,
)  # of our threads' CPU time that others may take, and seconds that do not count

Found = TypeVar("Found")


def measured_and_kept(
    file: Path, measure: Callable[[], Found], fields: Callable[[Found], Mapping[str, Any]]
) -> Found:
    """`measure()`, whose `fields` are kept in a file of the cache, unless other programs slowed it.

    They did if they took CPU time that this process's threads needed: what they used less what the
    other cores have. A cache that cannot be written is no error: the next run measures again.
    """
    # 1. Measure. cpu_percent counts all programs since its last call.
    psutil.cpu_percent()
    wall, own = time.perf_counter(), time.process_time()
    found = measure()
    wall, own = time.perf_counter() - wall, time.process_time() - own
    cores, threads = psutil.cpu_count() or 1, torch.get_num_threads()
    others = psutil.cpu_percent() / 100 * cores * wall - own

    # 2. Keep it.
    if others - max(cores - threads, 0) * wall > max(SHARE * threads * wall, LEAST):
        log.warning(
            "other programs were busy while speeds were measured: they are measured again next time"
        )
        return found
    with suppress(InputError):
        remove_leftovers(file.parent)
        write_json(file, fields(found))
    return found


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
