"""Compiled forwards: what they are filled up with is never seen, and they change no token."""

from functools import partial

import pytest
import torch
from models import CONFIGS, random_head, random_model, save_model
from torch import nn

from treespec.cache import TreeLayer
from treespec.draft.fit.measure import path
from treespec.errors import InputError
from treespec.heads.checkpoint import save_head
from treespec.model.compiled import BUCKETS, Compiled, Room, padded, padded_mask
from treespec.model.packed import PackedLinear
from treespec.model.regions import CompiledLayers
from treespec.spec import Spec, load
from treespec.target import Target

PROMPTS = [[5, 6, 7, 8, 9], [3, 4], [11, 12, 13, 14, 15, 16, 17]]


def test_the_drawing():
    """Three nodes in a bucket of four over eight columns, of which three are committed."""
    seen = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 1]]).bool()
    whole = padded_mask(seen[None], Room(4, 8))[0].int()
    assert whole[:3].tolist() == [[*row, 0, 0] for row in seen.int().tolist()]
    assert whole[3].tolist() == [0, 0, 0, 0, 0, 0, 1, 0]
    assert padded(torch.tensor([[5, 6, 7]]), 4).tolist() == [[5, 6, 7, 0]]


def test_nodes_have_room_in_the_cache_or_there_is_none():
    cpu, model = torch.device("cpu"), random_model(CONFIGS["llama"]())
    by_bucket = Compiled(lambda: None, cpu, "eager")
    by_layer = CompiledLayers(model.model, model.model.layers, "eager")
    for compiled, three in ((by_bucket, Room(4, 8)), (by_layer, Room(3, 6))):
        layer = TreeLayer(capacity=4)
        assert compiled.room(3, [layer]) is None
        layer.update(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8))
        layer.length = 3
        assert compiled.room(3, [layer]) == three
        assert layer.capacity == 8
        assert compiled.room(BUCKETS[-1] + 1, [layer]) is None


@pytest.mark.parametrize("buckets", [True, False])
@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_compiling_changes_no_token(name, buckets):
    """Temperature 0 in float32: full and sliding layers, learned positions, one text and three, tree and baseline."""
    model = Target(random_model(CONFIGS[name]()))
    head = random_head(model)

    def answers():
        spec = Spec(model, head, "eagle")
        alone = [one.generate(PROMPTS[0], max_new_tokens=24) for one in (spec, spec.baseline())]
        return [output.token_ids for output in (*alone, *spec.generate(PROMPTS, max_new_tokens=8))]

    plain = answers()
    model.compile("eager", buckets)  # the same shapes and graphs, without waiting for a code generator
    assert answers() == plain
    assert plain[0] == plain[1]


@pytest.mark.parametrize("buckets", [True, False])
def test_a_compiled_forward_is_the_plain_one_at_every_size_and_through_a_growing_cache(buckets):
    model, text = Target(random_model(CONFIGS["llama"]())), torch.randint(3, 64, (1, 12))
    trees = [path(n, torch.randint(3, 64, (n,))) for n in (1, 3, 8, 11, 100)]
    taps = (0, 2)

    def outputs():
        found = []
        for tree in trees:
            cache = model.new_cache(capacity=16)
            model.prefill(cache, text)
            out = model.forward_tree(cache, tree, taps)
            cache.commit([[0]])
            again = model.forward_tree(cache, tree, taps)
            found += [out.logits, out.features, again.logits, again.features]
        return found

    plain = outputs()
    model.compile("eager", buckets)
    for one, other in zip(plain, outputs(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_forwards_of_one_kind_keep_their_own_weights():
    """Two modules of a class in one process."""
    cpu, layer, x = torch.device("cpu"), TreeLayer(capacity=8), torch.randn(1, 4, 4)
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    layer.update(x[None], x[None])
    layer.length = 3

    def step(module, layers, x):
        return module(x)

    with torch.inference_mode():
        compiled = Compiled(partial(step, one), cpu, "eager")
        beside = compiled.likewise(other, step, cpu)
        for forward, module in ((compiled, one), (beside, other), (compiled.likewise(other, step, cpu), other)):
            assert torch.allclose(forward([layer], forward.room(3, [layer]), x), module(x), atol=1e-6)


@pytest.mark.parametrize(("name", "forms"), [("llama", 1), ("gpt2", 1), ("gemma3", 2)])
def test_layers_that_are_alike_share_a_graph_of_all_sizes(name, forms):
    """Through prompts and trees of many sizes and a cache that grows; gemma3 has sliding layers and full ones."""
    graphs = []

    def counting(graph, inputs, **options):
        graphs.append(graph)
        return graph.forward

    model = Target(random_model(CONFIGS[name]()))
    head = random_head(model)
    model.compile(counting)
    for tree in ("eagle", "chain:1", "2x3", "dynamic:nodes=12,depth=3"):
        spec = Spec(model, head, tree)
        for length in (1, 2, 3, 30):
            spec.generate(list(range(3, 3 + length)), max_new_tokens=9)
            spec.baseline().generate(list(range(3, 3 + length)), max_new_tokens=3)
    assert len(graphs) == forms + 1  # the head's
    for texts in (3, 2):  # begun by the single nodes of a baseline
        spec.baseline().generate([[3, 4, 5]] * texts, max_new_tokens=3)
        spec.generate([[3, 4, 5]] * texts, max_new_tokens=9)
    assert len(graphs) == 2 * (forms + 1)


def test_a_graph_that_computes_something_else_is_refused():
    """A layer whose weights depend on its number in a way that nothing but its number tells."""
    model = random_model(CONFIGS["llama"]())
    kind = type(model.model.layers[0])
    scaled = type(kind.__name__, (kind,), {"forward": lambda self, x, **rest: scale(self, x, kind.forward, rest)})
    for layer in model.model.layers:
        layer.__class__ = scaled
    with pytest.raises(InputError, match=r"--compile fails for LlamaForCausalLM, leave it out: .* differ"):
        Target(model).compile("eager")


def scale(layer, x, forward, rest):
    return forward(layer, x, **rest) * (1 + 10 * layer.self_attn.layer_idx)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_without_a_tree_a_compiled_model_is_what_it_was(name):
    """Features without a cache, and transformers' own generation over its own cache, after graphs were made."""
    model = Target(random_model(CONFIGS[name]()))
    one, two = torch.randint(3, 64, (1, 9)), torch.randint(3, 64, (2, 9))

    def outputs():
        return model.features(one), model.features(two), model.model.generate(one, max_new_tokens=5, do_sample=False)

    plain = outputs()
    model.compile("eager")
    assert all(torch.equal(a, b) for a, b in zip(plain, outputs(), strict=True))


@pytest.mark.slow
def test_generated_code_changes_no_token():
    model = Target(random_model(CONFIGS["llama"]()))
    spec = Spec(model, random_head(model), "eagle")
    plain = spec.generate(PROMPTS[0], max_new_tokens=40).token_ids
    model.compile()
    assert Spec(model, random_head(model), "eagle").generate(PROMPTS[0], max_new_tokens=40).token_ids == plain


def test_a_model_that_accelerate_moves_is_not_compiled():
    model = Target(random_model(CONFIGS["llama"]()))
    model.model.model.layers[0]._hf_hook = object()
    with pytest.raises(InputError, match="lies on one device"):
        model.compile()


@pytest.mark.slow
def test_generated_code_takes_packed_weights(tmp_path):
    """Every linear layer of target and head, and within what bfloat16 rounds to."""
    folder = str(save_model(tmp_path / "model"))
    save_head(random_head(Target.load(folder)), tmp_path / "head")
    spec, plain = (load(folder, str(tmp_path / "head"), dtype="bfloat16", compile=c) for c in (True, False))
    packs = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    linear = [m for m in (*spec.target.model.modules(), *spec.head.modules()) if hasattr(m, "out_features")]
    assert all(isinstance(m, PackedLinear) == packs for m in linear)
    tokens = torch.arange(3, 15)
    for n in (1, 7):
        rows = []
        for one in (spec, plain):
            cache = one.target.new_cache()
            one.target.prefill(cache, tokens[None])
            rows.append(one.target.forward_tree(cache, path(n, tokens)).logits)
        assert torch.allclose(rows[0], rows[1], atol=0.05 * float(rows[1].std()), rtol=0.05)
