"""Directories of other projects, built by hand: each gives the head that it was built from, or says what is wrong."""

import json
from pkgutil import resolve_name

import pytest
import torch
from equality import seeded
from models import GROUPED, change, random_eagle3, random_head, random_model
from refusals import complains
from safetensors.torch import load_file, save_file
from test_depth_heads import heads_for
from transformers import LlamaConfig

from treespec.draft.heads.registry import PROPOSER_BY_KIND
from treespec.heads.checkpoint import load_head
from treespec.heads.formats.export import outputs
from treespec.heads.formats.sglang import from_sglang, to_sglang_ids
from treespec.heads.registry import HEADS
from treespec.model.target import Target
from treespec.train.recipes import TRAINING_BY_KIND

DRAFTED = torch.randperm(64, generator=seeded(1))[:32].sort().values
IDS = "eagle_aux_hidden_state_layer_ids"
EIGHT = Target(random_model(LlamaConfig(**GROUPED | {"num_hidden_layers": 8})))
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
THREE = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32, "tie_word_embeddings": False}
NESTED = {"eagle_config": {IDS: [1, 3, 4], "use_aux_hidden_state": True}}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": 32,
    IDS: [2, 4, 5],
    "norm_before_residual": False,
    "transformer_layer_config": LLAMA | {"model_type": "llama"},
}


def one(bias=True):
    """An EAGLE-1 head; without bias it is zero."""
    head = random_head(EIGHT)
    if not bias:
        head.fc.bias.data.zero_()
    return head


def three(residual=False, drafted=DRAFTED):
    head = random_eagle3(EIGHT, drafted=drafted)
    head.midlayer.norm_before_residual = residual
    return head


def layered(tensors):
    return {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}


def in_whole(tensors):
    """Within the model that the heads are for."""
    return {f"medusa_head.{name}": value for name, value in tensors.items()} | {"model.norm.weight": torch.ones(32)}


def as_vllm(tensors):
    """Medusa's heads of one block by vLLM's names."""
    names = {"0.linear.weight": "blocks.{}.layers.0.weight", "0.linear.bias": "blocks.{}.layers.0.bias"}
    names["1.weight"] = "lm_heads.{}.weight"
    return {names[name[2:]].format(name[0]): value for name, value in tensors.items()}


def with_unused(tensors):
    return tensors | {"input_embed_fn.weight": torch.randn(64, 32)}


def with_prefix_unused(tensors):
    unused = {"embed_tokens.weight": torch.randn(64, 32), "layers.0.self_attn.rotary_emb.inv_freq": torch.randn(4)}
    return with_unused(tensors) | {f"prefix_embeding_layer.{name}": value for name, value in unused.items()}


def without_bias(tensors):
    return {name: value for name, value in tensors.items() if name != "fc.bias"}


def depth_heads(kind):
    return lambda: heads_for(EIGHT, kind)


# name: (head, config.json, how its tensors are told there)
DIRECTORIES = {
    "eagle": (one, LLAMA | {"architectures": ["LlamaForCausalLM"]}, dict),
    "eagle-vllm": (lambda: one(bias=False), LLAMA | {"architectures": ["EagleLlamaForCausalLM"]}, without_bias),
    "eagle-sglang": (one, LLAMA | {"architectures": ["LlamaForCausalLMEagle"]}, dict),
    "eagle3-safeailab": (three, THREE, dict),
    "eagle3-vllm": (three, THREE | {IDS: [2, 4, 5]}, layered),
    "eagle3-vllm-residual": (lambda: three(True), THREE | {"norm_before_residual": True}, dict),
    "eagle3-sglang": (three, THREE | NESTED, dict),
    "speculators": (three, SPECULATORS, layered),
    "medusa": (depth_heads("medusa"), {"medusa_num_heads": 2}, dict),
    "medusa-later": (depth_heads("medusa"), {}, dict),
    "medusa-whole": (depth_heads("medusa"), LLAMA | {"medusa_num_heads": 4, "medusa_num_layers": 1}, in_whole),
    "medusa-vllm": (
        depth_heads("medusa"),
        {"model_type": "medusa", "num_heads": 4, "num_hidden_layers": 1, "medusa_fc_bias": True},
        as_vllm,
    ),
    "hydra": (depth_heads("hydra"), {"hydra_head_arch": "mlp", "grounded_heads": True}, with_unused),
    "hydra++": (
        depth_heads("hydra++"),
        {"hydra_num_heads": 4, "hydra_num_layers": 4, "hydra_head_arch": "prefix-mlp"},
        with_prefix_unused,
    ),
}
FILES = {  # of those without model.safetensors
    **dict.fromkeys(("eagle", "eagle3-safeailab"), "pytorch_model.bin"),
    **dict.fromkeys(("hydra", "hydra++"), "hydra_lm_head.pt"),
    "medusa": "medusa_lm_head.pt",
    "medusa-later": "medusa_lm_head.safetensors",
}


def write(folder, config, tensors, name=""):
    """A directory. name: in `FILES`."""
    file = FILES.get(name, "model.safetensors")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save = save_file if file.endswith("safetensors") else torch.save
    save({name: value.detach().contiguous() for name, value in tensors.items()}, folder / file)
    return folder


def built(folder, name):
    """The directory of that name, and the head that it was built from."""
    make, config, told = DIRECTORIES[name]
    head = make()
    return write(folder, config, told(head.state_dict()), name), head


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_directory_gives_the_logits_of_the_head_that_it_was_built_from(name, tmp_path):
    folder, head = built(tmp_path, name)
    loaded = load_head(folder)
    assert loaded.kind == head.kind
    assert torch.equal(outputs(loaded), outputs(head))
    if IDS in str(DIRECTORIES[name][1]):
        assert loaded.aux_layers == head.aux_layers == (2, 4, 5)


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_missing_and_an_unknown_tensor_are_named(name, tmp_path):
    make, config, told = DIRECTORIES[name]
    tensors = make().state_dict()
    absent = next(n for n in tensors if ("q_proj" in n or "linear" in n) and n != "0.0.linear.weight")
    shown = absent if name != "speculators" else absent.replace("layers.0", "midlayer")
    with complains(f"lacks .*{shown}"):
        load_head(write(tmp_path, config, told({n: v for n, v in tensors.items() if n != absent}), name))
    with complains(r"unknown tensors \S*stray\.weight"):
        load_head(write(tmp_path, config, told(tensors) | {stray(name): torch.zeros(2)}, name))


def stray(name):
    """In a whole model, other tensors are the model's."""
    return "medusa_head.stray.weight" if name == "medusa-whole" else "stray.weight"


def test_the_files_of_a_whole_model_are_read_where_they_hold_heads(tmp_path):
    folder, head = built(tmp_path, "medusa-whole")
    tensors = load_file(folder / "model.safetensors")
    places = {name: f"part-{int(name[12]) % 2}.safetensors" for name in tensors if name.startswith("medusa_head.")}
    for file in set(places.values()):
        save_file({name: tensors[name] for name, place in places.items() if place == file}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": places | {"model.norm.weight": "absent.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(outputs(load_head(folder)), outputs(head))
    (folder / "model.safetensors.index.json").write_text("[]")
    with complains(r"index\.json is damaged"):
        load_head(folder)


def test_speculators_heads_norm_their_residual_where_they_do_not_say(tmp_path):
    config = {name: value for name, value in SPECULATORS.items() if name != "norm_before_residual"}
    head = three(residual=True)
    loaded = load_head(write(tmp_path, config, layered(head.state_dict())))
    assert torch.equal(outputs(loaded), outputs(head))
    assert (outputs(loaded) - outputs(three())).abs().max() > 0.1


def test_an_aux_layer_is_the_one_that_is_entered_and_sglangs_id_the_one_it_leaves():
    """hidden_states[k] enters layer k and leaves layer k - 1."""
    left = {}

    def keep(k):
        return lambda _, __, out: left.update({k: out[0] if isinstance(out, tuple) else out})

    handles = [layer.register_forward_hook(keep(k)) for k, layer in enumerate(EIGHT.stack)]
    features = EIGHT.features(torch.arange(3, 9)[None], (2, 4, 5))
    for handle in handles:
        handle.remove()
    assert torch.equal(features, torch.cat([left[k] for k in to_sglang_ids((2, 4, 5))], dim=-1))
    assert tuple(from_sglang(to_sglang_ids((2, 40, 77)))) == (2, 40, 77)
    with pytest.raises(ValueError, match="reads the target's embedding"):
        to_sglang_ids((0, 1, 2))


@pytest.mark.parametrize(
    "name, changes, complaint",
    [
        ("eagle3-sglang", {"eagle_config": {IDS: [1, 3]}}, r"fc\.weight is \[32, 96\], config\.json says \[32, 64\]"),
        ("eagle3-vllm", {"norm_before_fc": True}, r"lacks input_norm\.weight"),
        ("speculators", {"fc_norm": True, "norm_before_fc": True}, "both true, and exclude each other"),
        ("speculators", {"speculators_model_type": "eagle"}, "speculators_model_type is 'eagle': .*'eagle3'"),
        (
            "speculators",
            {"speculators_model_type": "other"},
            "'other': treespec reads 'dflash', 'eagle', 'eagle3', 'peagle'",
        ),
        ("speculators", {"transformer_layer_config": {"model_type": "phi3"}}, "'phi3', of which only 'llama' and"),
        ("speculators", {"transformer_layer_config": LLAMA}, r"lacks midlayer\.self_attn\.k_norm\.weight"),
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
    folder, _ = built(tmp_path, name)
    change(folder, **changes)
    with complains(complaint):
        load_head(folder)


def test_hydra_heads_that_do_not_tell_their_attention_heads_ask_for_them(tmp_path):
    make, config, _ = DIRECTORIES["hydra++"]
    folder = write(tmp_path, config | {"base_model_name_or_path": "vicuna"}, make().state_dict())
    with complains(r"num_attention_heads is missing, .* add what vicuna has"):
        load_head(folder)


def test_every_table_of_heads_has_the_same_kinds_and_names_what_exists():
    for name, kind in HEADS.items():
        named = (kind.head, kind.read, kind.write, TRAINING_BY_KIND[name].objective)
        assert all(callable(resolve_name(name)) for name in named if name)
    assert list(TRAINING_BY_KIND) == list(PROPOSER_BY_KIND) == list(HEADS)
