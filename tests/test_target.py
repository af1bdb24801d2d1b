"""One forward over a tree is the forward over each of its paths, for every architecture that can branch."""

import pytest
import torch
import transformers as hf
from equality import close, seeded
from models import CANNOT_BRANCH, CONFIGS, VOCAB, random_model, target
from refusals import complains
from tiny_configs import MODELS, tiny

from treespec.model.target import Target
from treespec.trees.layout import layout
from treespec.trees.static import StaticTree
from treespec.trees.tree import TokenTree

TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (0, 1, 1), (0, 1, 1, 0)))
PREFIX = 9  # longer than the sliding window of 6
TOLERANCE = 2e-4  # float32, logits of order 1 to 10


def random_tree(seed=0):
    shape = layout(TREE, torch.device("cpu"))
    tokens = torch.randint(3, VOCAB, (TREE.size,), generator=seeded(seed))
    return TokenTree(tokens, shape.parents, shape.depth, shape.ancestors)


def prefix(seed=1, length=PREFIX):
    return torch.randint(3, VOCAB, (1, length), generator=seeded(seed))


def plain_logits(model, tokens):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens])).logits[0]


def paths_of(tree):
    """(node, nodes from the root to it) for every node."""
    return [(i, tree.ancestors[i].nonzero().flatten().tolist()) for i in range(len(tree.tokens))]


@pytest.mark.parametrize("name", CONFIGS)
def test_commit_equals_a_fresh_prefill(name):
    model = target(name)
    tree = random_tree()
    text = prefix()
    path = [0, 1, 5, 8]  # moves keys and values
    assert tree.ancestors[8].nonzero().flatten().tolist() == path
    cache = model.new_cache(capacity=16)
    model.prefill(cache, text)
    model.forward_tree(cache, tree)
    cache.commit([path])
    again = model.new_cache(capacity=64)
    model.prefill(again, torch.cat([text, tree.tokens[path][None]], dim=1))
    assert cache.lengths == again.lengths == [PREFIX + 4]
    following = random_tree(seed=7)
    ours = model.forward_tree(cache, following)
    fresh = model.forward_tree(again, following)
    close(ours.logits, fresh.logits, TOLERANCE, TOLERANCE)
    close(ours.features, fresh.features, TOLERANCE, TOLERANCE)


def test_aux_layers_are_transformers_hidden_states():
    model = target("llama")
    text = prefix()
    aux_layers = (0, 1, 2)
    cache = model.new_cache()
    features = torch.cat([model.prefill(cache, part, aux_layers) for part in text.split(4, 1)], 1)
    with torch.inference_mode():
        states = model.model(input_ids=text, output_hidden_states=True).hidden_states
    close(features, torch.cat([states[k] for k in aux_layers], dim=-1), TOLERANCE)


@pytest.mark.parametrize("name", CANNOT_BRANCH)
def test_what_cannot_hold_a_tree_is_refused_with_the_reason(name):
    make, reason = CANNOT_BRANCH[name]
    model = hf.AutoModelForCausalLM.from_config(make())
    with complains(reason) as caught:
        Target(model)
    assert type(model).__name__ in str(caught.value)


def test_a_model_whose_logits_depend_on_more_than_hidden_states_is_refused():
    model = random_model(CONFIGS["llama"]())
    plain_forward = model.forward

    def shifted(input_ids, **kwargs):
        out = plain_forward(input_ids=input_ids, **kwargs)
        out.logits = out.logits + input_ids[..., None]
        return out

    model.forward = shifted
    with complains("output path"):
        Target(model)


PARTS = ["model.embed_tokens", "model.layers", "model.norm", "lm_head"]


@pytest.mark.parametrize("parts", [["model.layers"], ["model.embed_tokens"], ["lm_head"], PARTS])
def test_an_offloaded_target_scores_the_same_tree(tmp_path, parts):
    random_model(CONFIGS["llama"]()).save_pretrained(tmp_path / "model")
    places = {part: "disk" if part in parts else "cpu" for part in [*PARTS, "model.rotary_emb"]}
    outs = []
    for device_map in ("cpu", places):
        model = Target.load(f"{tmp_path}/model", dtype="float32", device_map=device_map)
        cache = model.new_cache()
        model.prefill(cache, prefix())
        outs.append(model.forward_tree(cache, random_tree()).logits)
        assert model.device == model.output_device == torch.device("cpu")
    close(*outs, TOLERANCE)


def test_an_offloaded_recurrent_target_scores_the_same_tree(tmp_path):
    random_model(tiny(MODELS["qwen3_next"], {"tie_word_embeddings": False})).save_pretrained(tmp_path / "model")
    places = dict.fromkeys([*PARTS, "model.rotary_emb"], "cpu") | {"model.embed_tokens": "disk"}
    outs = []
    for device_map in ("cpu", places):
        model = Target.load(f"{tmp_path}/model", dtype="float32", device_map=device_map)
        cache = model.new_cache()
        model.prefill(cache, prefix())
        outs.append(model.forward_tree(cache, random_tree()).logits)
    close(*outs, TOLERANCE)
