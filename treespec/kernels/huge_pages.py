"""Weights in pages of 2 MiB: who reads them all looks up five hundred times fewer addresses."""

import mmap
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

# bytes of a huge page and of a cache line
PAGE = 1 << 21
LINE = 64
SHARED = (
    16 * PAGE
)  # of a mapping that several pieces share, as most weights are smaller than a page

unused: list[Tensor] = []  # the rest of the newest shared mapping
lock = Lock()


def huge_pages(size: int) -> Tensor:
    """[size] uint8 zeros in huge pages, where the system has them."""
    if size > SHARED:
        return mapped(size)
    with lock:
        rest = unused.pop() if unused else mapped(0)
        if len(rest) < size:
            rest = mapped(SHARED)
        unused.append(rest[-(-size // LINE) * LINE :])
        return rest[:size]


def mapped(size: int) -> Tensor:
    """[size] uint8 zeros in a mapping of their own, which ends with its last tensor."""
    if not size or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % PAGE :][:size]
