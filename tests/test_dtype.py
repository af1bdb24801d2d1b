"""`--dtype auto` on a CPU: what the times say, measured once for a processor and a model."""

import json
import logging
import subprocess
import sys
import time
from dataclasses import asdict, replace

import psutil
import pytest
import torch
import transformers as hf
from evaluating import answered, config_in, save_models, tokens_of
from models import GROUPED, random_model, save_model

from treespec.api.load import load
from treespec.draft.calibration import Calibration
from treespec.draft.cost import timing
from treespec.draft.cost.dtype import (
    GUESS,
    NODES,
    costs_by_dtype,
    dtype_for,
    fastest,
    has_room,
    rates_of,
    reported,
)
from treespec.draft.cost.model import Cost
from treespec.draft.cost.timing import FORMAT, costs_in, kept_costs
from treespec.eval.run import evaluate
from treespec.files.atomic import read_json, write_json
from treespec.files.packages import cache_folder
from treespec.model.placement import Placement
from treespec.model.processor import processor
from treespec.model.stand_in import forward_seconds, size_of
from treespec.model.target import Target
from treespec.model.weights import load_config

FLAT, STEEP = (0.060, 0.064, 0.075, 0.090, 0.120), (0.050, 0.075, 0.120, 0.200, 0.360)  # seconds over NODES
LLAMA = hf.LlamaConfig(**GROUPED | {"dtype": "bfloat16"})
DTYPES = ("bfloat16", "float32")


def costs(**seconds):
    """Forwards over NODES by dtype, as costs."""
    return {dtype: Cost(NODES, tuple(forward)) for dtype, forward in seconds.items()}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


@pytest.fixture
def half(tmp_path):
    """A directory with weights in bfloat16."""
    folder = save_model(tmp_path / "half")
    Target.load(str(folder), dtype="bfloat16").model.save_pretrained(folder)
    return folder


def keep(folder, **seconds):
    """Costs of a directory's model, as if measured here before."""
    before = timing.LEAST
    timing.LEAST = 1e9  # other tests may keep the machine busy
    costs_by_dtype(size_of(load_config(str(folder))), DTYPES)
    timing.LEAST = before
    for file in files(cache_folder()):
        write_json(file, {"format": FORMAT} | {name: asdict(cost) for name, cost in costs(**seconds).items()})


def files(cache):
    return sorted(cache.glob("dtypes-*.json"))


@pytest.mark.parametrize(
    ("half", "full", "chosen"),
    [
        (STEEP, FLAT, "float32"),  # one token sooner in bfloat16, a tree sooner in float32
        (FLAT, STEEP, "bfloat16"),
        ((0.010, 0.100, 0.100, 0.100, 0.200), (0.050,) * 5, "bfloat16"),  # no tree is as fast as single tokens
        ((0.100, 0.120, 0.200, 0.400, 0.800), (0.100, 0.100, 0.200, 0.400, 0.800), "float32"),  # the least tree
        (FLAT, FLAT, "bfloat16"),  # the checkpoint's own
        (FLAT, tuple(0.97 * spent for spent in FLAT), "bfloat16"),  # so too where the other is hardly faster
    ],
)
def test_the_choice_follows_the_measured_times(half, full, chosen):
    assert fastest(costs(bfloat16=half, float32=full), "bfloat16") == chosen


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ((), "bfloat16"),  # no drafts: one token at a time
        ((0.05, 0.02), "bfloat16"),  # poor ones: 1.05 tokens from the tree that takes 64 ms
        ((0.5, 0.2, 0.1), "float32"),
    ],
)
def test_the_choice_follows_what_the_drafts_bring(rates, chosen):
    assert fastest(costs(bfloat16=STEEP, float32=FLAT), "bfloat16", rates) == chosen


def test_the_rates_are_those_of_the_first_head_that_has_any_and_a_modest_guess_for_others():
    known = Calibration((0.0,) * 4, (0.0,) * 7, rates={"0.01": (0.3, 0.1), "1": (0.2,)})
    assert rates_of([]) == ()
    assert rates_of([known]) == (0.3, 0.1)
    assert rates_of([None, known, replace(known, rates={"1": (0.9,)})]) == (0.3, 0.1)
    assert rates_of([None]) == rates_of([replace(known, rates={})]) == GUESS


def test_dtypes_are_measured_once_for_a_processor_and_a_model(tmp_path, monkeypatch):
    def measures(size, dtypes=DTYPES):
        """Whether it brings a file."""
        before = set(files(tmp_path))
        found = costs_by_dtype(size, dtypes, tmp_path)
        for file in (new := set(files(tmp_path)) - before):
            assert costs_in(file, dtypes) == found
            assert read_json(file, "")["machine"][0] == timing.processor()
        return bool(new)

    monkeypatch.setattr(timing, "LEAST", 1e9)  # other tests may keep the machine busy
    size = size_of(LLAMA)
    assert [measures(size), measures(size)] == [True, False]
    assert measures(size_of(hf.LlamaConfig(**GROUPED | {"intermediate_size": 32})))
    assert measures(size, ("float16", "float32"))
    monkeypatch.setattr(timing, "processor", lambda: "AMD EPYC, 2 cores, AVX512, avx2 avx512f")
    assert [measures(size), measures(size)] == [True, False]


@pytest.mark.parametrize("busy", [True, False])
def test_times_that_a_busy_machine_made_are_not_kept(tmp_path, caplog, busy):
    """By two loops a core, for 3 s. What takes 0.3 s is kept, however busy the machine is."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * psutil.cpu_count() * busy)]
    cost = Cost((1, 2), (1.0, 1.0))

    def measured():
        spin(3.0 if busy else 0.3)
        return {"cost": cost}

    assert kept_costs("busy", ["cost"], [], measured, tmp_path) == {"cost": cost}
    for loop in loops:
        loop.kill()
        loop.wait()
    assert bool(list(tmp_path.glob("busy-*.json"))) != busy
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


@pytest.mark.parametrize("config", [LLAMA, hf.GPT2Config(vocab_size=40, n_embd=32, n_layer=3, n_head=2)])
def test_a_stand_in_has_the_sizes_of_its_model(config):
    size = size_of(config)
    assert size.weights == sum(weight.numel() for weight in random_model(config).parameters())
    found = forward_seconds(size, [torch.bfloat16, torch.float32], (1, 3))
    assert [len(seconds) for seconds in found.values()] == [2, 2]
    assert all(second > 0 for seconds in found.values() for second in seconds)


def test_auto_is_the_checkpoints_own_where_nothing_narrower_could_be_faster_or_not_all_lies_on_the_cpu(half, cache):
    full = save_model(half.parent / "full")
    places = [(full, "auto", None), (half, "cuda:0", None), (half, {"": 0}, None), (half, "auto", {"cpu": "1GiB"})]
    for folder, device_map, max_memory in places:
        assert dtype_for(str(folder), Placement(device_map=device_map, max_memory=max_memory)) == "auto"
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    assert dtype_for(str(half), Placement(device_map="cpu")) == "auto"
    assert not files(cache)


def test_float32_is_not_taken_where_it_fills_the_memory():
    assert has_room(1)
    assert not has_room(10**13)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="auto takes the accelerator")
def test_the_dtype_is_told_and_gives_what_the_same_dtype_gives_when_asked_for(half, cache, caplog):
    keep(half, bfloat16=STEEP, float32=FLAT)
    with caplog.at_level(logging.WARNING, "treespec"):
        spec = load(half, drafter="lookup")
    assert "float32" in repr(spec)
    assert [record.getMessage() for record in caplog.records] == [
        reported("float32", "bfloat16", costs(bfloat16=STEEP, float32=FLAT))
    ]
    answer = spec.generate([5, 9, 3], max_new_tokens=12).token_ids
    assert answer == load(half, drafter="lookup", dtype="float32").generate([5, 9, 3], max_new_tokens=12).token_ids
    caplog.clear()
    assert load(half, drafter="lookup", dtype="bfloat16").target.dtype == torch.bfloat16
    keep(half, bfloat16=FLAT, float32=STEEP)
    assert load(half, drafter="lookup").target.dtype == torch.bfloat16
    assert not caplog.records


@pytest.mark.skipif(torch.accelerator.is_available(), reason="auto takes the accelerator")
def test_a_resumed_evaluation_keeps_the_dtype_that_it_began_in(tmp_path, cache):
    """Though the times that chose it are measured again, and say otherwise now."""
    save_models(tmp_path)
    target = tmp_path / "target"
    Target.load(str(target), dtype="bfloat16").model.save_pretrained(target)
    keep(target, bfloat16=STEEP, float32=FLAT)
    config = config_in(tmp_path, tmp_path / "out", dtype="auto", verifier="topk", max_new_tokens=4)
    assert evaluate(config)["environment"]["dtype"] == "float32"
    before = tokens_of(tmp_path / "out")
    file = tmp_path / "out" / "ledger.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:2]))
    keep(target, bfloat16=FLAT, float32=STEEP)
    assert evaluate(config)["environment"]["dtype"] == "float32"
    assert tokens_of(tmp_path / "out") == before
    assert answered(tmp_path / "out")
