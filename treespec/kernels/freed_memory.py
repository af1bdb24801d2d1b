"""Give memory that was freed back to the system.

glibc keeps freed blocks for the process. A model that was unpacked and packed again leaves twice its size of them.
"""

import ctypes
import sys


def return_freed_memory() -> None:
    """Give the free pages of the heap back to the system. Elsewhere than on Linux with glibc the call does nothing."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim:
        trim(0)
