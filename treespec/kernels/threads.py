"""How many threads a kernel may use: torch's number, within what the process's control group may use.

A container with `--cpus=1` on a large host sees all processors of the host, and torch starts a thread for each.
How many of these a kernel then uses is chosen in team.c, by how long they wait for each other.
"""

import math
from functools import cache
from pathlib import Path

import torch

# The quota of version 2 of control groups, in one file, and of version 1, in two.
QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")
OLD_QUOTA_FILE = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
OLD_PERIOD_FILE = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
NO_QUOTA = 1 << 16  # processors


def count_threads() -> int:
    """Return the number of threads that a kernel may use."""
    return min(torch.get_num_threads(), count_allowed_processors())


@cache
def count_allowed_processors() -> int:
    """Return how many processors' time the control group may use, rounded up. Without a quota it is a large number."""
    try:
        return read_quota(QUOTA_FILE.read_text())
    except (OSError, ValueError):
        pass
    try:
        return read_quota(f"{OLD_QUOTA_FILE.read_text()} {OLD_PERIOD_FILE.read_text()}")
    except (OSError, ValueError):
        return NO_QUOTA


def read_quota(text: str) -> int:
    """Return the processors of a quota and a period in microseconds: `150000 100000` is 2; `max` and -1 set no quota.

    Raises: ValueError for another text.
    """
    quota, period = text.split()
    if quota in ("max", "-1"):
        return NO_QUOTA
    return max(1, math.ceil(int(quota) / int(period)))
