"""Threads that have computed leave no workers behind, which would slow those of the next one."""

import subprocess
import sys

import pytest
import torch
from commands import to_command

from treespec.kernels import threads as kernel_threads
from treespec.kernels.threads import NO_QUOTA, read_quota


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


@pytest.mark.parametrize(
    "text, processors",
    [("max 100000\n", NO_QUOTA), ("-1\n 100000\n", NO_QUOTA), ("150000 100000\n", 2), ("20000 100000\n", 1)],
)
def test_the_quota_of_a_control_group_is_rounded_up_to_processors(text, processors):
    assert read_quota(text) == processors


@pytest.mark.parametrize("quota, threads", [("100000 100000", 1), ("max 100000", 2), ("nonsense", 2)])
def test_kernels_use_no_more_threads_than_their_quota_of_processors(quota, threads, tmp_path, monkeypatch):
    """The threads of torch are two here; a file that cannot be read sets no quota."""
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(kernel_threads, "QUOTA_FILE", tmp_path / "cpu.max")
    monkeypatch.setattr(kernel_threads, "OLD_QUOTA_FILE", tmp_path / "none")
    kernel_threads.count_allowed_processors.cache_clear()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert kernel_threads.count_threads() == threads
    finally:
        torch.set_num_threads(before)
        kernel_threads.count_allowed_processors.cache_clear()
