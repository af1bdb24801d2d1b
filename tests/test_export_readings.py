"""An export's proof reads by the other project's rule: what the writer believes wrongly shows as other logits."""

import json
from functools import partial

import pytest
import torch
from commands import complains
from drafters import build_eagle, build_eagle3
from head_files import (
    SERVED_CONFIG,
    YARN_ROPE,
    build_biased_eagle,
    build_dflash_of_eight,
    build_eagle4_of_eight,
    build_eagle31,
    build_medusa,
    build_p_eagle_of_eight,
    build_unbiased_eagle,
    build_whole_eagle3,
    save_with,
)
from safetensors.torch import load_file, save_file

from treespec.heads.formats.export import compare_exported, export, find_ends
from treespec.heads.formats.rules import RULES
from treespec.heads.formats.upstream import read_as
from treespec.heads.registry import HEAD_KINDS

RESIDUAL = partial(build_eagle31, {"norm_before_residual": True})
NORMED = partial(build_eagle31, {"norm_before_fc": True})
NEW = partial(build_eagle31, {"fc_norm": True, "norm_output": True})
IDS = "eagle_aux_hidden_state_layer_ids"


def edit(folder, **fields):
    """Set fields of config.json, `a__b` of a nested one; None takes one away."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for name, value in fields.items():
        *above, last = name.split("__")
        place = config
        for part in above:
            place = place[part]
        if value is None:
            del place[last]
        else:
            place[last] = value
    file.write_text(json.dumps(config))


def retensor(folder, make):
    """Tensors of the file, changed in place by `make`."""
    tensors = load_file(folder / "model.safetensors")
    make(tensors)
    save_file(tensors, folder / "model.safetensors")


def turn_over(tensors):
    """All tokens of the draft vocabulary one further."""
    tensors["d2t"] += 1


LATER = [3, 5, 6]
WRONG = [  # a project, a head, what is written otherwise, and what its rule then finds
    ("vllm", build_eagle3, {IDS: LATER}, "reads layers"),
    ("speculators", build_eagle3, {IDS: LATER}, "reads layers"),
    ("sglang", build_eagle3, {f"eagle_config__{IDS}": [2, 4, 5]}, "reads layers"),
    ("tensorrt-llm", build_eagle3, {f"eagle_config__{IDS}": [2, 4, 5]}, "reads layers"),
    ("mlx", build_eagle3, {IDS: LATER}, "reads layers"),
    ("speculators", build_dflash_of_eight, {"aux_hidden_state_layer_ids": LATER}, "reads layers"),
    ("vllm", RESIDUAL, {"norm_before_residual": None}, "logits differ"),
    ("mlx", RESIDUAL, {"norm_before_residual": None}, "logits differ"),
    ("speculators", RESIDUAL, {"norm_before_residual": None}, "norm_before_residual is missing"),
    ("speculators", build_eagle3, {"norm_before_residual": None}, "norm_before_residual is missing"),
    ("vllm", NORMED, {"norm_before_fc": None}, r"unknown tensors input_norm\.weight"),
    ("tensorrt-llm", NORMED, {"eagle_config__norm_before_fc": None}, r"unknown tensors input_norm\.weight"),
    ("sglang", NEW, {"norm_output": None}, "logits differ"),
    ("vllm", NEW, {"fc_norm": None}, r"unknown tensors fc_norm"),
    ("sglang", build_eagle3, {"draft_vocab_size": None}, "draft_vocab_size is missing"),
    ("vllm", build_eagle3, {"draft_vocab_size": None}, r"lm_head\.weight is \[32, 32\], .* says \[64, 32\]"),
    ("speculators", build_whole_eagle3, {"draft_vocab_size": None}, "draft_vocab_size is 32000"),
    ("vllm", build_eagle3, {"rope_theta": 77.0}, "logits differ"),
    ("sglang", build_eagle3, {"rope_scaling": YARN_ROPE | {"factor": 32.0}}, "logits differ"),
    ("speculators", build_eagle3, {"transformer_layer_config__rope_parameters__rope_theta": 77.0}, "logits differ"),
    ("speculators", build_eagle3, {"transformer_layer_config__model_type": None}, r"lacks midlayer\.self_attn\.k_norm"),
    ("sglang", build_eagle, {"bias": True}, r"lacks layers\.0\.self_attn\.k_proj\.bias"),
    ("eagle", build_eagle, {"bias": False}, r"unknown tensors fc\.bias"),
    ("vllm", build_unbiased_eagle, {"bias": True, "qkv_bias": None}, r"lacks layers\.0\.self_attn\.k_proj\.bias"),
    ("vllm", build_biased_eagle, {"qkv_bias": None}, r"unknown tensors layers\.0\.self_attn"),
    ("speculators", build_p_eagle_of_eight, {"mask_token_id": 5}, "logits differ"),
    ("speculators", build_dflash_of_eight, {"sample_from_anchor": True}, "logits differ|drafts"),
    ("speculators", build_dflash_of_eight, {"block_size": None}, "drafts"),
    ("nemo", build_eagle4_of_eight, {"sliding_window": 3}, "logits differ"),
    ("nemo", build_eagle4_of_eight, {"norm_output": None}, "norm_output is missing"),
    ("vllm", build_medusa, {"medusa_fc_bias": None}, "logits differ"),
    ("vllm", build_medusa, {"truncated_vocab_size": None}, "truncated_vocab_size is missing"),
    ("vllm", build_eagle3, turn_over, "leads to tokens that the target does not have"),
    ("mlx", build_eagle3, lambda tensors: tensors.pop("embed_tokens.weight"), "embed_tokens.* is missing"),
]


@pytest.mark.parametrize("to, make, wrong, found", WRONG)
def test_what_is_written_otherwise_than_a_project_reads_it_is_found(to, make, wrong, found, tmp_path):
    folder = tmp_path / "out"
    head = export(save_with(make(), tmp_path / "head"), to, folder, SERVED_CONFIG).head
    ends = find_ends(head)
    assert compare_exported(head, read_as(to, head.kind, folder, ends, 8), ends) > 0
    if callable(wrong):
        retensor(folder, wrong)
    else:
        edit(folder, **wrong)
    with pytest.raises(ValueError, match=found):
        compare_exported(head, read_as(to, head.kind, folder, ends, 8), ends)


def test_there_is_a_rule_for_each_project_and_kind_that_is_exported():
    assert RULES.keys() == {(to, name) for name, kind in HEAD_KINDS.items() for to in kind.engines}


def test_speculators_takes_the_targets_output_in_place_of_one_of_all_tokens(tmp_path):
    """So a head of all tokens goes out with all but its mask token; one that drafts some as it is."""
    head = build_dflash_of_eight()
    folder = tmp_path / "out"
    exported = export(save_with(head, tmp_path / "head"), "speculators", folder, SERVED_CONFIG)
    assert exported.left_out == head.mask_token
    ends = find_ends(head)
    edit(folder, draft_vocab_size=64)
    retensor(folder, lambda tensors: tensors.update({"lm_head.weight": head.lm_head.weight.detach().clone()}))
    retensor(folder, lambda tensors: [tensors.pop(name) for name in ("d2t", "t2d")])
    theirs = read_as("speculators", "dflash", folder, ends, 8)
    assert torch.equal(theirs.lm_head.weight, ends.output)
    with pytest.raises(ValueError, match="logits differ"):
        compare_exported(head, theirs, ends)


def test_a_causality_that_a_project_does_not_compute_is_refused(tmp_path):
    """speculators' full layers see the whole block, whatever a config says."""
    head = build_dflash_of_eight()
    head = save_with(type(head)(head.config | {"causal": [True]}), tmp_path / "head")
    with complains("not exported to speculators: .* its logits differ"):
        export(head, "speculators", tmp_path / "out", SERVED_CONFIG)
    assert not (tmp_path / "out").exists()
