"""Weights in pages of 2 MiB: a pass over all weights looks up 512 times fewer page addresses."""

import mmap
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

# bytes of a huge page and of a cache line
HUGE_PAGE_BYTES = 1 << 21
CACHE_LINE_BYTES = 64
# bytes of a mapping that several tensors share: most weights are smaller than a page
SHARED_MAPPING = 16 * HUGE_PAGE_BYTES

unused: list[Tensor] = []  # the unused end of the newest shared mapping
lock = Lock()


def allocate_huge_pages(size: int) -> Tensor:
    """Allocate [size] uint8 zeros, in huge pages if the system has them."""
    if size > SHARED_MAPPING:
        return map_huge_pages(size)
    with lock:
        rest = unused.pop() if unused else map_huge_pages(0)
        if len(rest) < size:
            rest = map_huge_pages(SHARED_MAPPING)
        unused.append(rest[-(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES :])
        return rest[:size]


def map_huge_pages(size: int) -> Tensor:
    """Allocate [size] uint8 zeros in a new mapping, which is freed with its last tensor."""
    if not size or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE_PAGE_BYTES :][:size]
