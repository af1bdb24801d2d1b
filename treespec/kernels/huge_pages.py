"""Weights in pages of 2 MiB: who reads them all looks up five hundred times fewer addresses."""

import mmap
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

# bytes of a huge page and of a cache line
HUGE_PAGE_BYTES = 1 << 21
CACHE_LINE_BYTES = 64
SHARED_MAPPING = (
    16 * HUGE_PAGE_BYTES
)  # of a mapping that several pieces share, as most weights are smaller than a page

unused: list[Tensor] = []  # the rest of the newest shared mapping
lock = Lock()


def allocate_huge_pages(size: int) -> Tensor:
    """[size] uint8 zeros in huge pages, where the system has them."""
    if size > SHARED_MAPPING:
        return map_huge_pages(size)
    with lock:
        rest = unused.pop() if unused else map_huge_pages(0)
        if len(rest) < size:
            rest = map_huge_pages(SHARED_MAPPING)
        unused.append(rest[-(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES :])
        return rest[:size]


def map_huge_pages(size: int) -> Tensor:
    """[size] uint8 zeros in a mapping of their own, which ends with its last tensor."""
    if not size or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE_PAGE_BYTES :][:size]
