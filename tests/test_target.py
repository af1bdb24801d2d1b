"""One forward over a tree is the forward over each of its paths, for every architecture that can branch."""

import pytest
import torch
import transformers as hf
from models import CANNOT_BRANCH, CONFIGS, VOCAB, random_model, target

from treespec.errors import InputError
from treespec.model.target import Target
from treespec.trees.layout import layout
from treespec.trees.static import StaticTree
from treespec.trees.tree import TokenTree

TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (0, 1, 1), (0, 1, 1, 0)))
PREFIX = 9  # longer than the sliding window of 6
TOLERANCE = 2e-4  # float32, logits of order 1 to 10


def random_tree(seed=0):
    shape = layout(TREE, torch.device("cpu"))
    tokens = torch.randint(3, VOCAB, (TREE.size,), generator=torch.Generator().manual_seed(seed))
    return TokenTree(tokens, shape.parents, shape.depth, shape.ancestors)


def prefix(seed=1, length=PREFIX):
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def plain_logits(model, tokens):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens])).logits[0]


def paths_of(tree):
    """(node, nodes from the root to it) for every node."""
    return [(i, tree.ancestors[i].nonzero().flatten().tolist()) for i in range(len(tree.tokens))]


@pytest.mark.parametrize("name", CONFIGS)
def test_tree_forward_equals_each_path_forward(name):
    model, tree, text = target(name), random_tree(), prefix()
    cache = model.new_cache(capacity=4)  # grows on the way
    model.prefill(cache, text)
    out = model.forward_tree(cache, tree)
    for node, path in paths_of(tree):
        alone = plain_logits(model.model, text[0].tolist() + tree.tokens[path].tolist())[-1]
        assert torch.allclose(out.logits[node], alone, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", CONFIGS)
def test_commit_equals_a_fresh_prefill(name):
    model, tree, text = target(name), random_tree(), prefix()
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
    ours, fresh = model.forward_tree(cache, following), model.forward_tree(again, following)
    assert torch.allclose(ours.logits, fresh.logits, atol=TOLERANCE, rtol=TOLERANCE)
    assert torch.allclose(ours.features, fresh.features, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_prefill_in_chunks_equals_prefill_at_once(name):
    model, text = target(name), prefix(length=23)
    whole, parts = model.new_cache(), model.new_cache()
    at_once = model.prefill(whole, text)
    chunked = model.prefill(parts, text, chunk=5)
    assert torch.allclose(at_once, chunked, atol=TOLERANCE, rtol=TOLERANCE)
    assert whole.lengths == parts.lengths == [23]


def test_aux_layers_are_transformers_hidden_states():
    model, text = target("llama"), prefix()
    aux_layers = (0, 1, 2)
    features = model.prefill(model.new_cache(), text, aux_layers, chunk=4)
    with torch.inference_mode():
        states = model.model(input_ids=text, output_hidden_states=True).hidden_states
    assert torch.allclose(features, torch.cat([states[k] for k in aux_layers], dim=-1), atol=TOLERANCE)


@pytest.mark.parametrize("name", CANNOT_BRANCH)
def test_what_cannot_hold_a_tree_is_refused_with_the_reason(name):
    make, reason = CANNOT_BRANCH[name]
    model = hf.AutoModelForCausalLM.from_config(make())
    with pytest.raises(InputError, match=reason) as caught:
        Target(model)
    assert type(model).__name__ in str(caught.value)


def test_a_model_with_an_unknown_output_path_is_refused():
    model = random_model(CONFIGS["llama"]())
    plain_forward = model.forward

    def scaled(*args, **kwargs):
        out = plain_forward(*args, **kwargs)
        out.logits = out.logits * 2
        return out

    model.forward = scaled
    with pytest.raises(InputError, match="output path"):
        Target(model)


def test_an_offloaded_target_scores_the_same_tree(tmp_path):
    random_model(CONFIGS["llama"]()).save_pretrained(tmp_path / "model")
    whole = Target.load(str(tmp_path / "model"), dtype="float32")
    offloaded = Target.load(
        str(tmp_path / "model"),
        dtype="float32",
        device_map={
            "model.embed_tokens": "cpu",
            "model.layers": "disk",
            "model.norm": "cpu",
            "lm_head": "cpu",
        }
        | {"model.rotary_emb": "cpu"},
    )
    outs = []
    for model in (whole, offloaded):
        cache = model.new_cache()
        model.prefill(cache, prefix())
        outs.append(model.forward_tree(cache, random_tree()).logits)
    assert torch.allclose(*outs, atol=TOLERANCE)
