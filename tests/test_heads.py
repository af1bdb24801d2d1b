"""The EAGLE head: its file format to the bit, its cache, and the pair it sees."""

import json
import shutil

import pytest
import torch
from models import random_head, target
from refusals import complains
from safetensors.torch import load_file, save_file

from treespec.draft.trained.kinds import fit, new_head
from treespec.heads.checkpoint import load_head, save_head

PUBLISHED = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "float16",
    "vocab_size": 64,
}
HEAD_NAMES = {
    "embed_tokens.weight": (64, 32),
    "fc.weight": (32, 64),
    "fc.bias": (32,),
    "layers.0.self_attn.q_proj.weight": (32, 32),
    "layers.0.self_attn.k_proj.weight": (16, 32),
    "layers.0.self_attn.v_proj.weight": (16, 32),
    "layers.0.self_attn.o_proj.weight": (32, 32),
    "layers.0.mlp.gate_proj.weight": (48, 32),
    "layers.0.mlp.up_proj.weight": (48, 32),
    "layers.0.mlp.down_proj.weight": (32, 48),
    "layers.0.post_attention_layernorm.weight": (32,),
}


@pytest.fixture
def published(tmp_path):
    """A directory as SafeAILab/EAGLE publishes it, at tiny size, in half precision."""
    folder = tmp_path / "published"
    folder.mkdir()
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape).half() for name, shape in HEAD_NAMES.items()}
    (folder / "config.json").write_text(json.dumps(PUBLISHED, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_published_directory_is_saved_bit_for_bit_with_checksums(published, tmp_path):
    again = tmp_path / "again"
    save_head(load_head(published), again)
    *fields, checksum = json.loads((again / "config.json").read_text()).items()
    assert fields == list(PUBLISHED.items())
    assert checksum[0] == "checksum"
    assert "checksum" not in load_head(again).config
    one, other = ((folder / "model.safetensors").read_bytes() for folder in (published, again))
    data = sum(value.nbytes for value in load_file(published / "model.safetensors").values())
    assert one[-data:] == other[-data:]


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
@pytest.mark.parametrize("name", ["../x", "sub/../../x", "/tmp/x", "..\\x", "C:\\x", ".."])
def test_an_index_that_names_a_file_outside_its_folder_is_refused(published, index, name):
    (published / "model.safetensors").rename(published.parent / "x")
    (published / index).write_text(json.dumps({"weight_map": {"fc.weight": name}}))
    with complains(r"index\.json names .* outside the head's folder"):
        load_head(published)


def test_an_index_may_name_links_out_of_its_folder_as_the_hubs_cache_has_them(published):
    (published / "model.safetensors").rename(published.parent / "blob")
    (published / "part.safetensors").symlink_to(published.parent / "blob")
    places = {"weight_map": dict.fromkeys(HEAD_NAMES, "part.safetensors")}
    (published / "model.safetensors.index.json").write_text(json.dumps(places))
    assert load_head(published).state_dict().keys() == HEAD_NAMES.keys()


def test_a_config_edited_by_hand_is_refused_until_its_checksum_is_deleted(published):
    save_head(load_head(published), published)
    file = published / "config.json"
    fields = json.loads(file.read_text()) | {"max_position_embeddings": 64}
    file.write_text(json.dumps(fields))
    with complains(r"config\.json .* if you have edited it, delete its field 'checksum'"):
        load_head(published)
    del fields["checksum"]
    file.write_text(json.dumps(fields))
    assert load_head(published).config["max_position_embeddings"] == 64


def test_a_head_that_cannot_be_written_is_a_line(published, tmp_path):
    (tmp_path / "file").write_text("")
    with complains(r"cannot write .*file"):
        save_head(load_head(published), tmp_path / "file" / "head")


def test_a_pickled_checkpoint_loads_as_tensors_only(published):
    tensors = load_file(published / "model.safetensors")
    (published / "model.safetensors").unlink()
    torch.save(tensors, published / "pytorch_model.bin")
    assert all(torch.equal(value, tensors[name]) for name, value in load_head(published).state_dict().items())
    torch.save({"fc.weight": print}, published / "pytorch_model.bin")
    with complains("more than tensors"):
        load_head(published)
    torch.save([torch.zeros(2)], published / "pytorch_model.bin")
    with complains("more than tensors by name"):
        load_head(published)


def retold(**changes):
    """Change tensors of a folder's file."""

    def change(folder):
        tensors = load_file(folder / "model.safetensors") | {name.replace("__", "."): t for name, t in changes.items()}
        save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")

    return change


@pytest.mark.parametrize(
    "complaint, spoil",
    {
        "no head directory": lambda f: shutil.rmtree(f),
        "has no config.json": lambda f: (f / "config.json").unlink(),
        "is damaged": lambda f: (f / "config.json").write_text("{"),
        r"config\.json|says": lambda f: (f / "config.json").write_text("{}"),
        "neither model.safetensors nor": lambda f: (f / "model.safetensors").unlink(),
        "damaged": lambda f: (f / "model.safetensors").write_bytes(b"x" * 99),
        r"lacks fc\.bias": retold(fc__bias=None),
        "unknown tensors d2t": retold(d2t=torch.zeros(2)),
        r"fc\.weight is \[2, 2\]": retold(fc__weight=torch.zeros(2, 2)),
        r"fc\.weight": retold(fc__weight=torch.full((32, 64), torch.nan)),
    }.items(),
)
def test_a_bad_head_is_refused_with_its_name(published, spoil, complaint):
    spoil(published)
    with complains(complaint) as caught:
        load_head(published)
    assert "published" in str(caught.value)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2", "opt", "phi3", "gpt-neox"])
@pytest.mark.parametrize("leave_out", [(), ("embed_tokens.weight",)], ids=["as of old", "without embedding"])
def test_a_new_head_has_the_widths_of_its_target_and_survives_its_file(name, leave_out, tmp_path):
    model = target(name)
    head = random_head(model)
    save_head(head, tmp_path, leave_out=leave_out)
    loaded = load_head(tmp_path)
    fit(loaded, model, "h")
    assert loaded.embed_tokens.weight is model.model.get_input_embeddings().weight
    tokens, features = torch.randint(3, 64, (1, 6)), torch.randn(1, 6, head.hidden_size)
    assert torch.equal(head.step(tokens, features, torch.arange(6)), loaded.step(tokens, features, torch.arange(6)))


def test_the_head_sees_embeddings_as_its_target_does():
    model = target("gemma3")
    tokens = torch.tensor([[3, 4, 5]])
    head = new_head("eagle", model)
    scaled = model.model.get_input_embeddings()(tokens)
    assert torch.allclose(head.embed_tokens(tokens) * head.embed_scale, scaled)
