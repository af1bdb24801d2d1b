"""Measured seconds are kept for a processor, unless other programs were busy while they were measured."""

import subprocess
import sys
import time

import psutil
import pytest

from treespec.draft.cost.model import Cost, kept_cost
from treespec.model.processor import processor


@pytest.mark.parametrize("busy", [True, False])
def test_times_that_a_busy_machine_made_are_not_kept(tmp_path, caplog, busy):
    """By two loops a core, for 3 s. What takes 0.3 s is kept, however busy the machine is."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * psutil.cpu_count() * busy)]
    cost = Cost((1, 2), (1.0, 1.0))

    def measured():
        spin(3.0 if busy else 0.3)
        return cost

    assert kept_cost(tmp_path / "busy.json", measured) == cost
    for loop in loops:
        loop.kill()
        loop.wait()
    assert (tmp_path / "busy.json").exists() != busy
    assert ("other programs were busy" in caplog.text) == busy


def spin(seconds):
    """A loop that runs for some seconds."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def test_a_processor_is_its_name_and_its_instruction_sets(tmp_path):
    text = "processor : 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2 fma sse\n\nmodel name\t: AMD EPYC\n"
    (tmp_path / "old").write_text(text)
    (tmp_path / "new").write_text(text.replace("avx2", "avx2 avx512_bf16"))
    old, new = processor(tmp_path / "old"), processor(tmp_path / "new")
    assert old.startswith("AMD EPYC, ")
    assert old.endswith("avx2 fma")
    assert new.endswith("avx2 avx512_bf16 fma")
    assert processor(tmp_path / "no such file").split(",")[0]
