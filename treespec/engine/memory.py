"""How many positions of keys and values fit in the free memory of a device."""

from contextlib import suppress
from pathlib import Path

import psutil
import torch

from treespec.model.target import Target

# The cache may take 1/4 of the free memory: it is up to twice as long as its requests, and a change of its
# rows copies it once.
PREFILL_SHARE = 4


@torch.inference_mode()
def free_columns(target: Target, texts: int = 1) -> int | None:
    """Compute how many columns fit in a quarter of the free memory.

    A column is the keys and values of one position of one request, in all layers. The caller holds the
    model.

    texts: the most requests that run at a time; their recurrent states, if the target has any, are
    subtracted from the free memory first. Returns None if the device does not report its free memory,
    and for a target without keys and values.
    """
    # 1. Bytes of a column, from a cache with one token. A target with only recurrent layers has none: the
    #    size of a request's state does not depend on its length.
    cache = target.build_cache(capacity=1)
    target.prefill(cache, torch.zeros(1, 1, dtype=torch.int64, device="cpu"))
    column_bytes = 0
    for layer in cache.tree_layers:
        for states in layer.storage:
            column_bytes += states[0, :, 0].numel() * states.element_size()
    if not column_bytes:
        return None

    # 2. Free bytes on the device of the output layer, less the requests' recurrent states.
    free_bytes = free_memory_of(target.output_device)
    if free_bytes is None:
        return None
    free_bytes = max(free_bytes - texts * cache.state_bytes, 0)
    return free_bytes // (PREFILL_SHARE * column_bytes)


def free_memory_of(device: torch.device) -> int | None:
    """Return the free bytes of a device; None if its backend does not report them."""
    if device.type == "cpu":
        return free_memory()
    # torch 2.9 has no `get_memory_info` of accelerators: it reports the memory of cuda devices only.
    get_memory_info = getattr(torch.accelerator, "get_memory_info", torch.cuda.mem_get_info)
    with suppress(RuntimeError, ValueError, AssertionError):  # not supported by this backend
        return int(get_memory_info(device)[0])
    return None


def free_memory(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the free bytes of the machine, or of the process's control group (a container) if it has fewer.

    A group counts the page cache as used memory; its inactive pages are counted as free here.

    group: the folder of the control group's files.
    """
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError, KeyError):  # no group, or one without a limit
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = {}
        for line in (group / "memory.stat").read_text().splitlines():
            name, number = line.split()
            stat[name] = number
        free = min(free, max(limit - used + int(stat["inactive_file"]), 0))
    return free
