"""Freed memory stays in the process: fresh blocks cost a page fault every 4 KiB, more than the arithmetic on them."""

import ctypes
import sys

# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """For the whole process: blocks up to 32 MiB come from the heap, and up to 1 GiB of it stays when free.

    A sample from [26, 8192] probabilities takes a tenth of the time. Only glibc is asked, elsewhere nothing
    happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)
