"""Keeping freed memory in the process.

A fresh block costs a page fault every 4 KiB, which takes longer than the arithmetic on it.
"""

import ctypes
import sys

# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Let malloc serve blocks up to 32 MiB from the heap and keep up to 1 GiB of free heap.

    This holds for the whole process. A sample from [26, 8192] probabilities then takes a tenth of
    the time. It only has an effect on Linux with glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)
