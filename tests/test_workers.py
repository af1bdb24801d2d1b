"""Threads that have computed leave no workers behind, which would slow those of the next one."""

import subprocess
import sys

import pytest
from commands import to_command


def print_workers() -> None:
    """How many threads there are more than before a computation: after it, after their end, after another."""
    import time

    import psutil
    import torch

    from treespec.kernels.workers import end_workers

    def count_threads():
        time.sleep(0.2)
        return psutil.Process().num_threads()

    torch.set_num_threads(4)
    before = count_threads()
    torch.ones(1 << 22).exp_()
    many = count_threads()
    end_workers()
    few = count_threads()
    torch.ones(1 << 22).exp_()
    print(many - before, few - before, count_threads() - before)


@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP is looked for on Linux alone")
def test_a_thread_ends_its_workers_and_starts_new_ones():
    done = subprocess.run(to_command(print_workers), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "0", "3"]
