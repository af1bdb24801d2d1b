"""How many columns of keys and values the free memory holds."""

import psutil
import torch
from models import MODELS, random_model, target, tiny

from treespec.engine.memory import PREFILL_SHARE, free_columns, free_memory, free_memory_of
from treespec.model.target import Target


def test_a_column_counts_as_the_cache_stores_it(monkeypatch):
    """Llama: 3 layers of keys and values, 2 KV heads of 8 numbers, in float32."""
    monkeypatch.setattr("treespec.engine.memory.free_memory", lambda: 1 << 20)
    with torch.inference_mode():
        assert free_columns(target("llama")) == (1 << 20) // (PREFILL_SHARE * 3 * 2 * 2 * 8 * 4)


def test_a_device_of_unknown_free_memory_has_unlimited_columns():
    assert free_memory_of(torch.device("meta")) is None


def test_recurrent_states_of_a_full_batch_come_first(monkeypatch):
    """Of Qwen3-Next: the states before and after a forward and two earlier ones of each text, then columns."""
    model = Target(random_model(tiny(MODELS["qwen3_next"])))
    cache = model.build_cache()
    model.prefill(cache, torch.arange(7)[None])
    states = sum(x.nbytes for state in cache.states[0] for x in state.values())
    column = 2 * 2 * 8 * 4  # one layer of keys and values, 2 KV heads of 8 numbers, in float32
    for free, columns in (((1 << 20), ((1 << 20) - 3 * 4 * states) // (PREFILL_SHARE * column)), (1000, 0)):
        monkeypatch.setattr("treespec.engine.memory.free_memory", lambda free=free: free)
        assert free_columns(model, texts=3) == columns


def test_a_container_has_what_its_limit_and_the_machine_leave(tmp_path):
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
