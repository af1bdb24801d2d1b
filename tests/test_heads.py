"""The EAGLE and EAGLE-3 heads: their file format to the bit, their caches, and what they read of a target."""

import json
import shutil
from functools import partial

import pytest
import torch
from commands import complains
from drafters import source_of
from head_files import LLAMA_CONFIG, write_head
from models import randn, random_eagle3, random_head, random_model, same_weights, seeded, target, zeros
from safetensors.torch import load_file, save_file
from training import change_json, save_model
from transformers import LlamaConfig

from treespec.api.load import load
from treespec.draft.heads.loading import attach_to_target, build_new_head
from treespec.draft.vocabulary import save_vocabulary
from treespec.heads.checkpoint import load_head, save_head
from treespec.heads.eagle3 import list_default_aux_layers
from treespec.heads.formats.export import compute_outputs
from treespec.model.target import Target

HALF = torch.randperm(64, generator=seeded(1))[:32].sort().values


PUBLISHED = {  # config.json, and the tensors; EAGLE-3 has no embedding and does not say its aux layers
    "eagle": (
        LLAMA_CONFIG | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16"},
        """
embed_tokens.weight=64x32 fc.weight=32x64 fc.bias=32 layers.0.self_attn.q_proj.weight=32x32
layers.0.self_attn.k_proj.weight=16x32 layers.0.self_attn.v_proj.weight=16x32
layers.0.self_attn.o_proj.weight=32x32 layers.0.mlp.gate_proj.weight=48x32 layers.0.mlp.up_proj.weight=48x32
layers.0.mlp.down_proj.weight=32x48 layers.0.post_attention_layernorm.weight=32
""",
    ),
    "eagle3": (
        LLAMA_CONFIG | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32, "tie_word_embeddings": False},
        """
fc.weight=32x96 norm.weight=32 lm_head.weight=32x32 midlayer.self_attn.q_proj.weight=32x64
midlayer.self_attn.k_proj.weight=16x64 midlayer.self_attn.v_proj.weight=16x64
midlayer.self_attn.o_proj.weight=32x32 midlayer.mlp.gate_proj.weight=48x32 midlayer.mlp.up_proj.weight=48x32
midlayer.mlp.down_proj.weight=32x48 midlayer.post_attention_layernorm.weight=32 midlayer.hidden_norm.weight=32
midlayer.input_layernorm.weight=32
""",
    ),
}


def publish(folder, kind):
    """A directory as SafeAILab/EAGLE publishes it, at tiny size, in half precision."""
    config, listed = PUBLISHED[kind]
    torch.manual_seed(0)
    tensors = {}
    for part in listed.split():
        name, shape = part.split("=")
        tensors[name] = randn(*map(int, shape.split("x"))).half()
    if kind == "eagle3":
        tensors |= {"d2t": HALF - torch.arange(32), "t2d": torch.isin(torch.arange(64), HALF)}
    return write_head(folder, config, tensors)


def rewrite(folder, **changes):
    """Replace tensors of a file; None takes one away."""
    tensors = load_file(folder / "model.safetensors") | {name.replace("__", "."): t for name, t in changes.items()}
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")


@pytest.fixture
def published(tmp_path):
    return publish(tmp_path / "published", "eagle")


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_published_directory_is_saved_bit_for_bit_with_checksums(kind, tmp_path):
    folder = publish(tmp_path / "published", kind)
    again = tmp_path / "again"
    save_head(load_head(folder), again)
    *fields, checksum = json.loads((again / "config.json").read_text()).items()
    assert fields == list(PUBLISHED[kind][0].items())
    assert checksum[0] == "checksum"
    assert "checksum" not in load_head(again).config
    before, after = (load_file(place / "model.safetensors") for place in (folder, again))
    assert before.keys() == after.keys()
    assert all(torch.equal(value.view(torch.uint8), after[name].view(torch.uint8)) for name, value in before.items())


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
@pytest.mark.parametrize("name", ["../x", "sub/../../x", "/tmp/x", "..\\x", "C:\\x", ".."])
def test_an_index_that_names_a_file_outside_its_folder_is_refused(published, index, name):
    (published / "model.safetensors").rename(published.parent / "x")
    (published / index).write_text(json.dumps({"weight_map": {"fc.weight": name}}))
    with complains(r"index\.json names .* outside the head's folder"):
        load_head(published)


def test_an_index_may_name_links_into_the_hubs_cache(published):
    (published / "model.safetensors").rename(published.parent / "blob")
    (published / "part.safetensors").symlink_to(published.parent / "blob")
    names = load_file(published.parent / "blob").keys()
    places = {"weight_map": dict.fromkeys(names, "part.safetensors")}
    (published / "model.safetensors.index.json").write_text(json.dumps(places))
    assert load_head(published).state_dict().keys() == names


def test_a_config_edited_by_hand_is_refused_until_its_checksum_is_deleted(published):
    save_head(load_head(published), published)
    change_json(published, max_position_embeddings=64)
    with complains(r"config\.json .* if you have edited it, delete its field 'checksum'"):
        load_head(published)
    change_json(published, checksum=None)
    assert load_head(published).config["max_position_embeddings"] == 64


def test_a_head_that_cannot_be_written_is_a_line(published, tmp_path):
    (tmp_path / "file").write_text("")
    with complains(r"cannot write .*file"):
        save_head(load_head(published), tmp_path / "file" / "head")


def test_a_pickled_checkpoint_loads_as_tensors_only(published):
    tensors = load_file(published / "model.safetensors")
    (published / "model.safetensors").unlink()
    torch.save(tensors, published / "pytorch_model.bin")
    assert same_weights(load_head(published).state_dict(), tensors)
    torch.save({"fc.weight": print}, published / "pytorch_model.bin")
    with complains("more than tensors"):
        load_head(published)
    torch.save([zeros(2)], published / "pytorch_model.bin")
    with complains("more than tensors by name"):
        load_head(published)


@pytest.mark.parametrize(
    "complaint, spoil",
    {
        "no head directory": lambda f: shutil.rmtree(f),
        "has no config.json": lambda f: (f / "config.json").unlink(),
        "is damaged": lambda f: (f / "config.json").write_text("{"),
        r"config\.json|says": lambda f: (f / "config.json").write_text("{}"),
        "neither model.safetensors nor": lambda f: (f / "model.safetensors").unlink(),
        "damaged": lambda f: (f / "model.safetensors").write_bytes(b"x" * 99),
        r"fc\.weight is \[2, 2\]": lambda f: rewrite(f, fc__weight=zeros(2, 2)),
        r"fc\.weight": lambda f: rewrite(f, fc__weight=torch.full((32, 64), torch.nan, dtype=torch.float32)),
    }.items(),
)
def test_a_bad_head_is_refused_with_its_name(published, spoil, complaint):
    spoil(published)
    with complains(complaint) as caught:
        load_head(published)
    assert "published" in str(caught.value)


@pytest.mark.parametrize("make", [random_head, partial(random_eagle3, drafted=HALF)], ids=["eagle", "eagle3"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2", "opt", "phi3", "gpt-neox"])
@pytest.mark.parametrize("leave_out", [(), ("embed_tokens.weight",)], ids=["as of old", "without embedding"])
def test_a_new_head_fits_its_target_and_is_saved_and_loaded(name, leave_out, make, tmp_path):
    model = target(name)
    head = make(model)
    save_head(head, tmp_path, leave_out=leave_out)
    loaded = load_head(tmp_path)
    attach_to_target(loaded, model, "h")
    assert loaded.embed_tokens.weight is model.model.get_input_embeddings().weight
    assert loaded.aux_layers == head.aux_layers
    assert torch.equal(compute_outputs(head), compute_outputs(loaded))


def test_the_head_sees_embeddings_as_its_target_does():
    model = target("gemma3")
    tokens = torch.tensor([[3, 4, 5]])
    head = build_new_head("eagle", model)
    scaled = model.model.get_input_embeddings()(tokens)
    assert torch.allclose(head.embed_tokens(tokens) * head.embed_scale, scaled)


@pytest.fixture
def third(tmp_path):
    return publish(tmp_path / "published", "eagle3")


def test_another_layer_name_or_a_full_token_mapping_gives_the_same_head(third):
    head = load_head(third)
    tensors = load_file(third / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    save_file(renamed, third / "model.safetensors")
    assert same_weights(load_head(third).state_dict(), head.state_dict())
    change_json(third, draft_vocab_size=64)
    whole = {"d2t": torch.zeros(64, dtype=torch.int64), "t2d": torch.ones(64, dtype=torch.bool)}
    rewrite(third, lm_head__weight=randn(64, 32).half(), **whole)
    assert load_head(third).vocabulary is None


def test_a_head_without_embedding_and_aux_layers_takes_its_targets(third):
    model = target("llama")
    head = load_head(third, torch.float32)
    assert head.embed_tokens is None
    attach_to_target(head, model, "h")
    assert head.aux_layers == (0, 1, 2)
    assert torch.equal(head.embed_tokens.weight, model.model.get_input_embeddings().weight)
    assert head.vocabulary.tolist() == HALF.tolist()
    wide = Target(random_model(LlamaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=3, num_attention_heads=4)))
    head.embed_tokens = None
    head.feature_size = 192
    with complains(r"lacks embed_tokens\.weight, and the target's embedding is 64 wide, not 32"):
        attach_to_target(head, wide, "h")


@pytest.mark.parametrize(
    "layers, aux_layers",
    [(80, (2, 40, 77)), (32, (2, 16, 29)), (7, (2, 3, 4)), (6, (3, 4, 5)), (1, (0, 0, 0))],
)
def test_the_published_aux_layers_and_three_of_a_small_target(layers, aux_layers):
    assert list_default_aux_layers(layers) == aux_layers
    assert all(0 <= layer < layers for layer in aux_layers)


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"norm__weight": None}, r"lacks norm\.weight; it was read as an EAGLE-3 head"),
        ({"d2t": None}, "lacks d2t, which names the token of each row of lm_head"),
        ({"lm_head__weight": zeros(30, 32)}, r"lm_head\.weight is \[30, 32\], and d2t names 32 tokens"),
        ({"d2t": HALF - torch.arange(32) + 9}, "d2t does not lead once to each token that t2d marks: they differ at"),
        ({"d2t": 5 - torch.arange(32)}, "d2t does not lead once to each token"),
        ({"t2d": torch.isin(torch.arange(64), HALF[:-1])}, f"they differ at .{HALF[-1]}"),
    ],
)
def test_a_bad_file_is_refused_by_the_name_of_its_tensor(third, changes, complaint):
    rewrite(third, **changes)
    with complains(complaint) as caught:
        load_head(third)
    assert "published" in str(caught.value)


@pytest.mark.parametrize(
    "config, complaint",
    [
        ({"hidden_size": "wide"}, r"config\.json does not describe an EAGLE-3 head"),
        ({"eagle_aux_hidden_state_layer_ids": ["low"]}, r"config\.json does not describe an EAGLE-3 head"),
        ({"target_hidden_size": 48}, r"fc\.weight is \[32, 96\], config\.json says \[32, 144\]"),
    ],
)
def test_a_config_that_contradicts_itself_or_its_file_is_refused(third, config, complaint):
    change_json(third, **config)
    with complains(complaint):
        load_head(third)
    (third / "config.json").write_text("[]")
    with complains("is no JSON object"):
        load_head(third)


def test_a_head_that_reads_layers_its_target_lacks_is_refused(third):
    change_json(third, eagle_aux_hidden_state_layer_ids=[2, 16, 29])
    with complains(r"reads layer 16, the target has 3: it is for another"):
        source_of(f"eagle3:{third}", target("llama"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_loads_packed_and_drafts_its_separate_vocabulary(tmp_path, dtype):
    model = save_model(tmp_path / "model")
    loaded = Target.load(str(model))
    save_head(random_eagle3(loaded, drafted=torch.arange(90, 130)), tmp_path / "head")
    spec = load(str(model), f"{tmp_path}/head", "eagle", "rrs-wo", dtype=dtype)
    assert spec.head.vocabulary.tolist() == list(range(90, 130))
    assert len(spec.generate("the question", temperature=1.0, max_new_tokens=8, seed=0).token_ids) == 8
    save_vocabulary(torch.arange(100, 150), 0.5, tmp_path / "head")
    spec = load(str(model), f"{tmp_path}/head", "eagle", "rrs-wo", dtype=dtype)
    assert spec.head.vocabulary.tolist() == list(range(100, 130))
    assert spec.generate("the question", temperature=1.0, max_new_tokens=8, seed=0).stats.drafted[0] > 0
    save_vocabulary(torch.arange(20), 0.5, tmp_path / "head")
    with complains("no token in common"):
        load(str(model), f"{tmp_path}/head", dtype=dtype)
