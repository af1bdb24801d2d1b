"""The OpenMP workers of a thread that has computed, and now leaves that to another.

Each thread of Python that computes has workers of its own. OpenMP counts them all: where there are
more than processors, they sleep at every barrier, and a barrier takes ten times as long. So the
thread that loads a model ends its workers before an engine's thread begins.
"""

import ctypes
import sys
from pathlib import Path

HARD = 1  # omp_pause_hard of OpenMP 5.0


def end_workers() -> None:
    """End the calling thread's workers; its next large operation starts new ones.

    Where no OpenMP library is found that can, nothing happens.
    """
    if sys.platform == "linux":
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        for library in {line.split()[-1] for line in mapped if "gomp" in line}:
            pause = getattr(ctypes.CDLL(library), "omp_pause_resource_all", None)
            if pause:
                pause(HARD)
