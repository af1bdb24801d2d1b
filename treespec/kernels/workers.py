"""End the OpenMP workers of a thread that will not compute any more.

Each Python thread that computes has its own workers. OpenMP counts them all: if there are
more workers than processors, they sleep at every barrier instead of spinning for a while. So the
thread that loads a model ends its workers before an engine's thread begins, and a prefetching thread ends its workers
when it has read.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

OMP_PAUSE_HARD = 1  # omp_pause_hard of OpenMP 5.0


def end_workers() -> None:
    """End the calling thread's workers; its next large operation starts new ones.

    Without a GNU OpenMP library that supports it, nothing happens.
    """
    for pause in find_pause_functions():
        pause(OMP_PAUSE_HARD)


@cache
def find_pause_functions() -> list[Callable[[int], int]]:
    """Return `omp_pause_resource_all` of each GNU OpenMP library that the process has loaded."""
    functions = []
    for file in find_openmp_files():
        pause = getattr(ctypes.CDLL(file), "omp_pause_resource_all", None)
        if pause:
            functions.append(pause)
    return functions


def find_openmp_files() -> list[str]:
    """Return the paths of the GNU OpenMP libraries that the process has loaded; torch brings one."""
    if sys.platform != "linux":
        return []
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    files = {line.split(maxsplit=5)[-1] for line in mapped if "gomp" in line}
    return sorted(files)
