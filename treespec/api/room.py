"""How many columns of keys and values the free memory holds, beside the recurrent states of the texts."""

from contextlib import suppress
from pathlib import Path

import psutil
import torch

from treespec.model.target import Target

SHARE = 4  # a cache is up to twice as long as its texts, and a change of its rows copies it once


@torch.inference_mode()
def free_columns(target: Target, texts: int = 1) -> int | None:
    """Columns that a quarter of the free memory holds; None where nobody knows how much is free.

    None too for a target without keys and values.

    A column is the keys and values of one position of one text, in all layers. texts: that may run
    at a time; their recurrent states, if the target has any, are taken from the free memory first.
    The caller holds the model.
    """
    # 1. Bytes of a column, from a cache with one token.
    cache = target.new_cache(capacity=1)
    target.prefill(cache, torch.zeros(1, 1, dtype=torch.int64))
    layers = [layer for layer in cache.tree_layers if layer.is_initialized]
    storages = [states for layer in layers for states in layer.storage]
    size = sum(states[0, :, 0].numel() * states.element_size() for states in storages)
    if not size:
        return None  # recurrent layers alone: a text's state has one size, whatever its length

    # 2. Bytes of the texts' recurrent states.
    beside = texts * cache.states.bytes_of_a_text if cache.states else 0

    # 3. Free bytes, where the output layer lies.
    device = target.output_device
    if device.type == "cpu":
        free = free_memory()
    elif device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        return None
    return max(free - beside, 0) // (SHARE * size)


def free_memory(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that the machine has free, and the process's control group (a container's), if fewer.

    A group counts cached pages of files as used; those that are not in use are free all the same.
    """
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError, KeyError):  # no group, or one without a limit
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, max(limit - used + int(stat["inactive_file"]), 0))
    return free
