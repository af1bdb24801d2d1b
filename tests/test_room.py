"""How many columns of keys and values the free memory holds."""

import psutil
import torch
from models import target

from treespec.room import SHARE, free_columns, free_memory


def test_a_column_counts_as_the_cache_stores_it(monkeypatch):
    """Llama: 3 layers of keys and values, 2 KV heads of 8 numbers, in float32."""
    monkeypatch.setattr("treespec.room.free_memory", lambda: 1 << 20)
    with torch.inference_mode():
        assert free_columns(target("llama")) == (1 << 20) // (SHARE * 3 * 2 * 2 * 8 * 4)


def test_a_container_has_what_its_limit_leaves_and_no_more_than_the_machine(tmp_path):
    machine = psutil.virtual_memory().total
    assert 0 < free_memory(tmp_path / "none") <= machine

    def group(limit):
        files = {"max": limit, "current": 700, "stat": "anon 500\ninactive_file 150"}
        for name, value in files.items():
            (tmp_path / f"memory.{name}").write_text(f"{value}\n")
        return free_memory(tmp_path)

    assert group(1000) == 450
    assert group(100) == 0
    assert 450 < group("max") <= machine
