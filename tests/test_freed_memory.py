"""Memory that a load has freed goes back to the system."""

import ctypes
import sys
from pathlib import Path

import pytest

from treespec.kernels.freed_memory import return_freed_memory

BLOCK_BYTES = 100_000  # below the size for which glibc asks the system for pages of its own
BLOCKS = 2000


def read_resident_bytes() -> int:
    """The process's own pages that are in memory."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_freed_blocks_below_a_used_one_leave_the_process():
    blocks = [b"x" * BLOCK_BYTES for _ in range(BLOCKS)]
    last = b"y" * BLOCK_BYTES  # keeps glibc from shrinking the heap by itself
    held = read_resident_bytes()
    blocks.clear()
    return_freed_memory()
    assert held - read_resident_bytes() > 0.9 * BLOCK_BYTES * BLOCKS
    assert last[-1:] == b"y"
