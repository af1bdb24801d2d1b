"""Memory that costs little to use: freed memory that stays in the process, and huge pages for weights."""

import ctypes
import mmap
import sys
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
HUGE, LINE = 1 << 21, 64  # bytes of a huge page and of a cache line
SHARED = 16 * HUGE  # weights share a mapping of this size, as most are smaller than a page

unused: list[Tensor] = []  # the rest of the newest mapping
lock = Lock()


def keep_freed_memory() -> None:
    """For the whole process: the heap serves blocks up to 32 MiB, and keeps up to 1 GiB when freed.

    Each fresh page of 4 KiB costs a page fault, which takes longer than the arithmetic on it. A sample from
    [26, 8192] probabilities then takes a tenth of the time. Only glibc on Linux has these settings; elsewhere
    the call does nothing. Only treespec's command line and its scripts call it: `import treespec` leaves the
    allocator of its host program as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)


def huge_pages(size: int) -> Tensor:
    """[size] uint8 zeros in huge pages where Linux has them: who reads them all looks up fewer addresses."""
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
    memory = mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE :][:size]
