"""The EAGLE-3 head: its file, what it draws its features and tokens from, and the text that it leaves the target's."""

import json
import re

import pytest
import torch
from drafting import source_of
from models import random_eagle3, random_model, save_model, target
from refusals import complains
from safetensors.torch import load_file, save_file
from test_heads import HALF, PUBLISHED, publish, rewrite
from transformers import LlamaConfig

from treespec.api.load import load
from treespec.draft.trained.kinds import fit
from treespec.draft.vocabulary import save_vocabulary
from treespec.heads.checkpoint import load_head, save_head
from treespec.heads.eagle3 import default_aux_layers
from treespec.model.target import Target

CONFIG = PUBLISHED["eagle3"][0]


@pytest.fixture
def published(tmp_path):
    return publish(tmp_path / "published", "eagle3")


@torch.no_grad()
def test_a_layer_by_its_other_name_and_a_mapping_of_all_tokens_give_the_same_head(published):
    head = load_head(published)
    tensors = load_file(published / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    save_file(renamed, published / "model.safetensors")
    assert all(torch.equal(value, load_head(published).state_dict()[name]) for name, value in head.state_dict().items())
    (published / "config.json").write_text(json.dumps(CONFIG | {"draft_vocab_size": 64}))
    whole = {"d2t": torch.zeros(64, dtype=torch.int64), "t2d": torch.ones(64, dtype=torch.bool)}
    rewrite(published, lm_head__weight=torch.randn(64, 32).half(), **whole)
    assert load_head(published).vocabulary is None


def test_a_head_without_embedding_and_aux_layers_takes_its_targets(published):
    model = target("llama")
    head = load_head(published, torch.float32)
    assert head.embed_tokens is None
    fit(head, model, "h")
    assert head.aux_layers == (0, 1, 2)
    assert torch.equal(head.embed_tokens.weight, model.model.get_input_embeddings().weight)
    assert head.vocabulary.tolist() == HALF.tolist()
    wide = Target(random_model(LlamaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=3, num_attention_heads=4)))
    head.embed_tokens, head.feature_size = None, 192
    with complains(r"lacks embed_tokens\.weight, and the target's embedding is 64 wide, not 32"):
        fit(head, wide, "h")


@pytest.mark.parametrize(
    "layers, aux_layers",
    [(80, (2, 40, 77)), (32, (2, 16, 29)), (7, (2, 3, 4)), (6, (3, 4, 5)), (1, (0, 0, 0))],
)
def test_the_published_aux_layers_and_three_of_a_small_target(layers, aux_layers):
    assert default_aux_layers(layers) == aux_layers
    assert all(0 <= layer < layers for layer in aux_layers)


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"norm__weight": None}, r"lacks norm\.weight; if .* is an EAGLE-3 head"),
        ({"t2d": None}, "lacks t2d"),
        ({"lm_head__weight": torch.zeros(30, 32)}, r"lm_head\.weight is \[30, 32\], config\.json says \[32, 32\]"),
        ({"d2t": HALF - torch.arange(32) + 9}, "d2t does not lead once to each token that t2d marks: they differ at"),
        ({"d2t": 5 - torch.arange(32)}, "d2t does not lead once to each token"),
        ({"t2d": torch.isin(torch.arange(64), HALF[:-1])}, f"they differ at .{HALF[-1]}"),
    ],
)
def test_a_bad_file_is_refused_by_the_name_of_its_tensor(published, changes, complaint):
    rewrite(published, **changes)
    with complains(complaint) as caught:
        load_head(published)
    assert "published" in str(caught.value)


@pytest.mark.parametrize(
    "config, complaint",
    [
        ({"draft_vocab_size": 65}, r"config\.json does not describe an EAGLE-3 head: draft_vocab_size is 65, of .* 64"),
        ({"eagle_aux_hidden_state_layer_ids": ["low"]}, r"config\.json does not describe an EAGLE-3 head"),
        ({"target_hidden_size": 48}, r"fc\.weight is \[32, 96\], config\.json says \[32, 144\]"),
    ],
)
def test_a_config_that_contradicts_itself_or_its_file_is_refused(published, config, complaint):
    (published / "config.json").write_text(json.dumps(CONFIG | config))
    with complains(complaint):
        load_head(published)
    (published / "config.json").write_text("[]")
    with complains("is no JSON object"):
        load_head(published)


def test_a_head_that_reads_layers_its_target_lacks_is_refused(published):
    (published / "config.json").write_text(json.dumps(CONFIG | {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}))
    with complains(r"reads layer 16, the target has 3: it is for another"):
        source_of(f"eagle3:{published}", target("llama"))
    (published / "config.json").write_text(json.dumps(CONFIG))
    with complains(rf"of kind eagle3: write eagle3:{re.escape(str(published))}"):
        source_of(f"eagle:{published}", target("llama"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_is_loaded_packed_and_drafts_the_tokens_of_a_vocabulary_beside_it(tmp_path, dtype):
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
