"""What lies in a target's directory is loaded whole and known by content, or one line says what is wrong."""

import os
import random
import shutil
from contextlib import suppress

import pytest
import torch
import transformers as hf
from commands import complains
from models import CONFIGS, ones, random_head, random_model, target
from safetensors.torch import load_file, save_file
from training import change_json

from treespec.errors import InputError
from treespec.files.hub import explain_missing
from treespec.heads.checkpoint import load_head, save_head
from treespec.model import identity
from treespec.model.identity import identify_model
from treespec.model.target import Target


@pytest.fixture
def folder(tmp_path):
    random_model(CONFIGS["llama"]()).save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def add_tensors(folder, **tensors):
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


def refusal(folder):
    with pytest.raises(InputError) as caught:
        Target.load(str(folder))
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "told, fields",
    {
        "they lack model.layers.3.input_layernorm.weight": {"num_hidden_layers": 4},
        "they hold model.layers.2.input_layernorm.weight": {"num_hidden_layers": 2},
        "num_hidden_layers = -3": {"num_hidden_layers": -3},
        "hidden_size = 'wide'; it must be a positive whole number": {"hidden_size": "wide"},
        r"by the config [": {"intermediate_size": 40},
        "names no model_type": {"model_type": None},
        "unheard-of": {"model_type": "unheard-of"},
    }.items(),
)
def test_a_config_that_does_not_fit_its_weights_is_one_line(folder, fields, told, capfd):
    change_json(folder, **fields)
    assert told in refusal(folder)
    assert "REPORT" not in capfd.readouterr().err  # transformers' own table of twenty lines


def test_weights_that_are_not_numbers_are_named(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with complains(r"not finite, in model\.layers\.1\.mlp\.up_proj\.weight"):
        Target.load(str(folder))


def test_tensors_that_older_checkpoints_hold_beside_the_weights_are_no_error(folder, tmp_path):
    """Rotary buffers, masks, and the layers of multi-token prediction, which no forward of ours runs."""
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": ones(4) for i in range(3)}
    change_json(folder, num_nextn_predict_layers=1)
    add_tensors(folder, **buffers, **{"model.layers.3.mlp.up_proj.weight": ones(2), "mtp.norm": ones(2)})
    Target.load(str(folder))
    random_model(CONFIGS["gpt2"]()).save_pretrained(tmp_path / "gpt2")
    mask = ones(1, 1, 128, 128)
    add_tensors(
        tmp_path / "gpt2", **{"transformer.h.0.attn.bias": mask, "transformer.h.0.attn.masked_bias": mask[0] + 1}
    )
    Target.load(f"{tmp_path}/gpt2")


@pytest.mark.parametrize(
    "form, parts, fields",
    [
        ("NVFP4 of ModelOpt", ("weight_scale", "weight_scale_2"), {}),
        ("NVFP4 of ModelOpt", ("weight_scale_2",), {"quantization_config": {"quant_method": "modelopt"}}),
        ("MLX", ("scales", "biases"), {"quantization": {"group_size": 32, "bits": 4}}),
        ("MLX", ("scales", "biases"), {"quantization_config": {"group_size": 32, "bits": 4}}),
    ],
)
def test_a_format_that_transformers_does_not_load_is_named(folder, form, parts, fields):
    up = "model.layers.0.mlp.up_proj"
    add_tensors(folder, **{f"{up}.weight": torch.zeros(48, 16, dtype=torch.uint8)})
    add_tensors(folder, **{f"{up}.{part}": ones(48, 2) for part in parts})
    change_json(folder, **fields)
    assert f"in the format {form}, which transformers does not load" in refusal(folder)


@pytest.mark.parametrize(
    "file, told", [("tekken.json", "pip install mistral-common"), ("tokenizer.model", "pip install sentencepiece")]
)
def test_a_tokenizer_that_takes_a_package_is_named(folder, file, told, capfd):
    (folder / file).write_bytes(b"\x0a\x0e\x0a\x05<unk>\x15")
    line = refusal(folder)
    assert f"{file} takes" in line
    assert told in line
    assert "sentencepiece" not in capfd.readouterr().err.lower()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_tied_weights_that_a_file_holds_once_are_no_error(tmp_path, kind):
    config = CONFIGS[kind]()
    config.tie_word_embeddings = True
    hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "target")
    assert "lm_head.weight" not in load_file(tmp_path / "target" / "model.safetensors")
    Target.load(f"{tmp_path}/target")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_flipped_bytes_are_one_line_or_a_model(folder, name):
    content = (folder / name).read_bytes()
    chance = random.Random(name)
    for _ in range(12):
        damaged = bytearray(content)
        damaged[chance.randrange(min(len(content), 2000))] ^= 1 << chance.randrange(8)
        (folder / name).write_bytes(damaged)
        with suppress(InputError):
            Target.load(str(folder))
    (folder / name).write_bytes(content[: len(content) // 2])
    assert "damaged" in refusal(folder)


def test_an_identity_follows_the_content_and_not_the_path(tmp_path, monkeypatch):
    save_head(random_head(target("llama"), seed=1), tmp_path / "a")
    first = identify_model(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    os.utime(tmp_path / "b" / "model.safetensors", (0, 0))
    (tmp_path / "b" / "training").mkdir()
    (tmp_path / "b" / ".lock").write_text("process 1")
    assert identify_model(tmp_path / "b") == first
    monkeypatch.chdir(tmp_path)
    assert identify_model("a") == first
    save_head(random_head(target("llama"), seed=2), tmp_path / "a")
    assert identify_model(tmp_path / "a") != first
    (tmp_path / "b" / "calibration.json").write_text("{}")
    assert identify_model(tmp_path / "b") != first


@pytest.mark.parametrize("blocks", [256, 4])
def test_first_and_last_bytes_of_a_large_file_count(tmp_path, monkeypatch, blocks):
    monkeypatch.setattr(identity, "SAMPLE_BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(identity, "SAMPLE_BLOCKS", blocks)
    content = bytes(64 << 10)
    file = tmp_path / "model.safetensors"
    seen = set()
    for place in (None, 0, len(content) - 1):
        changed = bytearray(content)
        if place is not None:
            changed[place] = 1
        file.write_bytes(changed)
        seen.add(identify_model(tmp_path))
    file.write_bytes(content + b"\0")
    assert len({*seen, identify_model(tmp_path)}) == 4


def test_a_mistyped_path_is_told_at_once_with_the_nearest_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "target").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for name in ("runs/trget", "rnus/target", "./runs/targt", "rnus/targt"):
        for load in (load_head, identify_model):
            with complains(rf"directory at {name}; did you mean runs/target\?"):
                load(name)
    for name in ("/nowhere/at/all", "a/b/c", "./x", "file", ""):
        assert explain_missing(name)
    for name in ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "gpt2", "org/target"):
        assert explain_missing(name) is None
