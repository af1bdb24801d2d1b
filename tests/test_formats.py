"""Directories of other projects, built by hand: each gives the head that it was built from, or says what is wrong."""

import json
from pkgutil import resolve_name

import pytest
import torch
from commands import complains
from drafters import EIGHT_LAYERS, build_eagle3
from head_files import (
    DIRECTORIES,
    LAYER_IDS_KEY,
    LLAMA_CONFIG,
    SPECULATORS_CONFIG,
    rename_midlayer,
    write_directory,
    write_head,
)
from models import zeros
from safetensors.torch import load_file, save_file
from training import change_json

from treespec.draft.heads.registry import PROPOSER_BY_KIND
from treespec.heads.checkpoint import load_head
from treespec.heads.formats.export import compute_outputs
from treespec.heads.formats.sglang import from_sglang, to_sglang_ids
from treespec.heads.registry import HEAD_KINDS
from treespec.train.recipes import TRAINING_BY_KIND


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_directory_gives_the_logits_of_the_head_behind_it(name, tmp_path):
    folder, head = write_directory(tmp_path, name)
    loaded = load_head(folder)
    assert loaded.kind == head.kind
    assert torch.equal(compute_outputs(loaded), compute_outputs(head))
    if LAYER_IDS_KEY in str(DIRECTORIES[name][1]):
        assert loaded.aux_layers == head.aux_layers == (2, 4, 5)


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_missing_and_an_unknown_tensor_are_named(name, tmp_path):
    make, config, told = DIRECTORIES[name]
    tensors = make().state_dict()
    absent = next(n for n in tensors if ("q_proj" in n or "linear" in n) and n != "0.0.linear.weight")
    shown = absent if name != "speculators" else absent.replace("layers.0", "midlayer")
    with complains(f"lacks .*{shown}"):
        load_head(write_head(tmp_path, config, told({n: v for n, v in tensors.items() if n != absent}), name))
    with complains(r"unknown tensors \S*stray\.weight"):
        load_head(write_head(tmp_path, config, told(tensors) | {stray(name): zeros(2)}, name))


def stray(name):
    """In a whole model, other tensors are the model's."""
    return "medusa_head.stray.weight" if name == "medusa-whole" else "stray.weight"


def test_the_files_of_a_whole_model_are_read_where_they_hold_heads(tmp_path):
    folder, head = write_directory(tmp_path, "medusa-whole")
    tensors = load_file(folder / "model.safetensors")
    places = {name: f"part-{int(name[12]) % 2}.safetensors" for name in tensors if name.startswith("medusa_head.")}
    for file in set(places.values()):
        save_file({name: tensors[name] for name, place in places.items() if place == file}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": places | {"model.norm.weight": "absent.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(compute_outputs(load_head(folder)), compute_outputs(head))
    (folder / "model.safetensors.index.json").write_text("[]")
    with complains(r"index\.json is damaged"):
        load_head(folder)


def test_speculators_heads_norm_their_residual_where_they_do_not_say(tmp_path):
    config = {name: value for name, value in SPECULATORS_CONFIG.items() if name != "norm_before_residual"}
    head = build_eagle3(residual=True)
    loaded = load_head(write_head(tmp_path, config, rename_midlayer(head.state_dict())))
    assert torch.equal(compute_outputs(loaded), compute_outputs(head))
    assert (compute_outputs(loaded) - compute_outputs(build_eagle3())).abs().max() > 0.1


def test_our_aux_layer_is_entered_where_sglangs_layer_id_is_left():
    """hidden_states[k] enters layer k and leaves layer k - 1."""
    left = {}

    def keep(k):
        return lambda _, __, out: left.update({k: out[0] if isinstance(out, tuple) else out})

    handles = [layer.register_forward_hook(keep(k)) for k, layer in enumerate(EIGHT_LAYERS.tree_decoder.stack)]
    features = EIGHT_LAYERS.compute_features(torch.arange(3, 9)[None], (2, 4, 5))
    for handle in handles:
        handle.remove()
    assert torch.equal(features, torch.cat([left[k] for k in to_sglang_ids((2, 4, 5))], dim=-1))
    assert tuple(from_sglang(to_sglang_ids((2, 40, 77)))) == (2, 40, 77)
    with pytest.raises(ValueError, match="reads the target's embedding"):
        to_sglang_ids((0, 1, 2))


@pytest.mark.parametrize(
    "name, changes, complaint",
    [
        (
            "eagle3-sglang",
            {"eagle_config": {LAYER_IDS_KEY: [1, 3]}},
            r"fc\.weight is \[32, 96\], config\.json says \[32, 64\]",
        ),
        ("eagle3-vllm", {"norm_before_fc": True}, r"lacks input_norm\.weight"),
        ("speculators", {"fc_norm": True, "norm_before_fc": True}, "both true, and exclude each other"),
        ("speculators", {"speculators_model_type": "eagle"}, "speculators_model_type is 'eagle': .*'eagle3'"),
        (
            "speculators",
            {"speculators_model_type": "other"},
            "'other': treespec reads 'dflash', 'dflash2', 'dspark', 'eagle', 'eagle3', 'peagle'",
        ),
        ("speculators", {"transformer_layer_config": {"model_type": "phi3"}}, "'phi3'; only 'llama' and"),
        ("speculators", {"transformer_layer_config": LLAMA_CONFIG}, r"lacks midlayer\.self_attn\.k_norm\.weight"),
        ("medusa", {"medusa_num_layers": 2}, r"'0\.2\.weight' is missing"),
        ("medusa", {"medusa_num_layers": 0}, "does not describe Medusa heads"),
        ("medusa", {"vocab_size": "many"}, "does not describe Medusa heads"),
        ("hydra", {"hidden_state_offset": 1}, "hidden_state_offset is 1"),
        ("hydra", {"hydra_head_arch": "cross-attn"}, "hydra_head_arch is 'cross-attn'"),
        ("hydra++", {"num_attention_heads": 0}, "does not describe Hydra"),
        ("hydra++", {"num_attention_heads": 4, "hidden_act": "other"}, "does not describe Hydra.*other"),
    ],
)
def test_a_config_that_is_not_known_is_refused_by_its_field(name, changes, complaint, tmp_path):
    folder, _ = write_directory(tmp_path, name)
    change_json(folder, **changes)
    with complains(complaint):
        load_head(folder)


def test_hydra_heads_that_do_not_tell_their_attention_heads_ask_for_them(tmp_path):
    make, config, _ = DIRECTORIES["hydra++"]
    folder = write_head(tmp_path, config | {"base_model_name_or_path": "vicuna"}, make().state_dict())
    with complains(r"num_attention_heads is missing, .* add what vicuna has"):
        load_head(folder)


ONLY_READ = ("dflash2", "dspine")  # kinds that treespec does not train yet


def test_every_table_of_heads_has_the_same_kinds_and_names_what_exists():
    for name, kind in HEAD_KINDS.items():
        training = TRAINING_BY_KIND.get(name)
        named = (kind.head, kind.read, kind.write, training and training.objective)
        assert all(callable(resolve_name(name)) for name in named if name)
    assert list(PROPOSER_BY_KIND) == list(HEAD_KINDS)
    assert list(TRAINING_BY_KIND) == [name for name in HEAD_KINDS if name not in ONLY_READ]
