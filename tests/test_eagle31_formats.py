"""Newer EAGLE-3 heads in the layouts of the projects that publish them: read, written, or refused by the part."""

import json
import re

import pytest
import torch
from commands import complains
from head_files import (
    EAGLE3_CONFIG,
    EAGLE31_VARIANTS,
    LAYER_IDS_KEY,
    LLAMA_CONFIG,
    SERVED_CONFIG,
    SLIDING_WINDOW,
    SPECULATORS_CONFIG,
    build_eagle31,
    rename_midlayer,
    save_with,
    write_head,
)
from models import ones
from safetensors.torch import load_file

from treespec.heads.checkpoint import load_head
from treespec.heads.formats.eagle3_fields import PARTS_BY_ENGINE, list_head_parts
from treespec.heads.formats.export import compute_outputs, export

QWEN3 = {"model_type": "qwen3", "head_dim": 8}


def in_speculators(parts):
    """config.json as speculators writes it, and how it names the tensors."""
    parts = dict(parts)
    layer = LLAMA_CONFIG | ({"model_type": "llama"} if not parts.pop("qk_norm", False) else QWEN3)
    layer |= {k: parts.pop(k) for k in ("num_hidden_layers", "layer_types", "sliding_window") if k in parts}
    return SPECULATORS_CONFIG | {"transformer_layer_config": layer} | parts, rename_midlayer


def in_vllm(parts):
    parts = dict(parts)
    qwen3 = parts.pop("qk_norm", False)
    architecture = {"architectures": ["Eagle3Qwen3ForCausalLM"]} | QWEN3 if qwen3 else {}
    return EAGLE3_CONFIG | {LAYER_IDS_KEY: [2, 4, 5]} | parts | architecture, rename_midlayer


def in_sglang(parts):
    def told(tensors):
        later = r"^(layers\.[1-9]\.)input_layernorm"
        return {re.sub(later, r"\1hidden_norm", name): value for name, value in rename_midlayer(tensors).items()}

    nested = {"eagle_config": {LAYER_IDS_KEY: [1, 3, 4], "norm_before_fc": parts.get("norm_before_fc", False)}}
    return EAGLE3_CONFIG | nested | {name: value for name, value in parts.items() if name != "norm_before_fc"}, told


def in_specforge(parts):
    """One layer named midlayer, and a mapping of the vocabulary in any case."""
    return EAGLE3_CONFIG | {"fc_norm": False} | parts, dict


@pytest.mark.parametrize("layout", [in_speculators, in_vllm, in_sglang, in_specforge])
@pytest.mark.parametrize("name", EAGLE31_VARIANTS)
def test_a_directory_of_each_layout_gives_the_logits_of_its_head(name, layout, tmp_path):
    head = build_eagle31(EAGLE31_VARIANTS[name])
    (config, told) = layout(EAGLE31_VARIANTS[name])
    loaded = load_head(write_head(tmp_path, config, told(head.state_dict())))
    assert torch.equal(compute_outputs(loaded), compute_outputs(head))
    assert list_head_parts(loaded) == list_head_parts(head)


def test_the_older_names_of_sglangs_norms_are_read(tmp_path):
    head = build_eagle31({"fc_norm": True})
    names = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
    tensors = head.state_dict()
    for i, name in enumerate(names):
        tensors[f"{name}.weight"] = tensors.pop(f"fc_norm.{i}.weight")
    folder = write_head(tmp_path, EAGLE3_CONFIG | {LAYER_IDS_KEY: [2, 4, 5], "use_aux_norm": True}, tensors)
    assert torch.equal(compute_outputs(load_head(folder)), compute_outputs(head))


@pytest.mark.parametrize("to", ["sglang", "vllm", "speculators", "eagle"])
@pytest.mark.parametrize("name", EAGLE31_VARIANTS)
def test_a_head_is_exported_only_to_formats_that_have_its_parts(name, to, tmp_path):
    head = build_eagle31(EAGLE31_VARIANTS[name])
    folder = save_with(head, tmp_path / "head")
    missing = sorted(part for part in list_head_parts(head) if to not in PARTS_BY_ENGINE[part])
    assert list_head_parts(head)
    if missing:
        with complains(rf"has {missing[0]}, which only .* know"):
            export(folder, to, tmp_path / "out", SERVED_CONFIG)
        return
    export(folder, to, tmp_path / "out", SERVED_CONFIG)
    assert torch.equal(compute_outputs(load_head(tmp_path / "out")), compute_outputs(head))


def test_the_engines_find_the_newer_parts_where_they_look(tmp_path):
    def exported(to, parts):
        export(save_with(build_eagle31(parts), tmp_path / f"for-{to}"), to, tmp_path / to, SERVED_CONFIG)
        return json.loads((tmp_path / to / "config.json").read_text())

    vllm, speculators = (exported(to, EAGLE31_VARIANTS["all"]) for to in ("vllm", "speculators"))
    sglang = exported("sglang", {"fc_norm": True, "norm_output": True, "num_hidden_layers": 2})
    assert vllm["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    layer = speculators["transformer_layer_config"]
    assert layer["architectures"] == ["Qwen3ForCausalLM"]
    told = {"model_type": "qwen3", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
    told |= {"use_sliding_window": True, "num_hidden_layers": 2}
    assert told.items() <= vllm.items()
    assert told.items() <= layer.items()
    for config in (vllm, speculators, sglang):
        assert config["fc_norm"] is config["norm_output"] is True
    names = load_file(tmp_path / "sglang" / "model.safetensors").keys()
    assert {"layers.1.hidden_norm.weight", "fc_norm.2.weight"} <= names
    assert "layers.1.input_layernorm.weight" not in names


@pytest.mark.parametrize(
    "complaint, parts",
    {
        r"layer_types is \['sliding_attention'\], .*sliding_window is None": SLIDING_WINDOW | {"sliding_window": None},
        r"layer_types is \['chunked_attention'\], must be full_attention or": {"layer_types": ["chunked_attention"]},
        r"lacks midlayer\.self_attn\.k_norm\.weight": {"qk_norm": True},
    }.items(),
)
def test_layers_that_cannot_be_are_refused_in_a_line(parts, complaint, tmp_path):
    folder = write_head(tmp_path, EAGLE3_CONFIG | parts, build_eagle31({}).state_dict())
    with complains(complaint):
        load_head(folder)


@pytest.mark.parametrize(
    "config, complaint",
    [
        (EAGLE3_CONFIG | {"eagle_config": {"norm_before_fc": True}}, r"lacks input_norm\.weight"),
        (
            LLAMA_CONFIG | {"architectures": ["MLPSpeculatorPreTrainedModel"]},
            "'MLPSpeculator.* is MLP and LSTM speculators, known",
        ),
        (
            EAGLE3_CONFIG | {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
            r"unknown tensors emb\.weight; it was read as an EAGLE-3 head \(Eagle3DeepseekV2",
        ),
        (
            EAGLE3_CONFIG | {"architectures": ["Other"]},
            r"unknown tensors emb\.weight; it was read as an EAGLE-3 head \(Other\)",
        ),
    ],
)
def test_a_head_of_unknown_parts_is_refused_by_tensors_and_architecture(config, complaint, tmp_path):
    with complains(complaint):
        load_head(write_head(tmp_path, config, {**build_eagle31({}).state_dict(), "emb.weight": ones(64, 32)}))
