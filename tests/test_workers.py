"""Threads that have computed leave no workers behind, which would slow those of the next one."""

import subprocess
import sys

import pytest

WORKERS = """
import time, psutil, torch
from treespec.kernels.workers import end_workers

def threads():
    time.sleep(0.5)
    return psutil.Process().num_threads()

torch.set_num_threads(4)
before = threads()
torch.ones(1 << 22).exp_()
many = threads()
end_workers()
few = threads()
torch.ones(1 << 22).exp_()
print(many - before, few - before, threads() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP is looked for on Linux alone")
def test_a_thread_ends_its_workers_and_starts_new_ones():
    done = subprocess.run([sys.executable, "-c", WORKERS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "0", "3"]
