"""Seconds of steps, timed in interleaved rounds, and kept in the user's cache.

Other work on the machine only adds time, so a step's cost is the lower quartile over rounds.
"""

import hashlib
import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil
import torch

from treespec.draft.cost.model import Cost
from treespec.errors import InputError
from treespec.files.atomic import read_json, remove_leftovers, write_json
from treespec.files.downloads import cache_folder
from treespec.model import kernels
from treespec.model.processor import processor

log = logging.getLogger(__name__)

Act = Callable[[], object]
Step = tuple[Act, Act]  # the act before it, as in decoding (it warms the caches), and the timed one
Costs = dict[str, Cost]

FORMAT = 1
ROUNDS, FEWEST, SECONDS = 12, 4, 10.0  # rounds; after SECONDS they stop, but not before FEWEST
SHARE, LEAST = 0.2, 0.5  # of our threads' CPU time that others may take; seconds that do not count


def kept_costs(
    kind: str,
    names: Sequence[str],
    about: object,
    measure: Callable[[], Costs],
    folder: Path | None,
) -> Costs:
    """The named costs from a file of the cache, or `measure()`, which that file then keeps.

    kind: the file's name begins with it. about: all that the costs depend on besides the processor,
    threads and torch, in JSON's types. folder: default treespec's in the user's cache. Costs measured
    while other programs took CPU time that our threads needed are not kept. A file that cannot be
    read or written is no error: the next run measures again.
    """
    # 1. Kept ones.
    machine = [processor(), torch.get_num_threads(), torch.__version__, kernels.name()]
    digest = hashlib.sha256(json.dumps([*machine, about], default=str).encode()).hexdigest()
    file = (folder or cache_folder()) / f"{kind}-{digest[:16]}.json"
    if (kept := costs_in(file, names)) is not None:
        return kept

    # 2. Measured now. cpu_percent counts all programs since its last call.
    psutil.cpu_percent()
    wall, own = time.perf_counter(), time.process_time()
    found = measure()
    wall, own = time.perf_counter() - wall, time.process_time() - own
    cores, threads = psutil.cpu_count() or 1, torch.get_num_threads()
    others = psutil.cpu_percent() / 100 * cores * wall - own
    if others - max(cores - threads, 0) * wall > max(SHARE * threads * wall, LEAST):
        log.warning(
            "other programs were busy while speeds were measured: they are measured again next time"
        )
        return found
    with suppress(InputError):
        remove_leftovers(file.parent)
        fields = {name: asdict(cost) for name, cost in found.items()}
        write_json(file, {"format": FORMAT, "machine": machine, **fields})
    return found


def costs_in(file: Path, names: Sequence[str]) -> Costs | None:
    """The named costs of a file; None where it is missing, damaged or not understood."""
    with suppress(InputError, LookupError, TypeError, ValueError):
        fields = read_json(file, "it is measured again", FORMAT)
        return {name: cost_of(**fields[name]) for name in names}
    return None


def cost_of(
    nodes: Sequence[int], forward: Sequence[float], overhead: Sequence[float], **rest: float
) -> Cost:
    """A cost as JSON holds it. Raises TypeError or ValueError for anything else."""
    one_hot, drawn = overhead
    return Cost(tuple(nodes), tuple(forward), overhead=(one_hot, drawn), **rest)


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
