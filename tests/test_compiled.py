"""Compiled forwards: what they are filled up with is never seen, and they change no token."""

from functools import partial

import pytest
import torch
from models import CONFIGS, random_head, random_model, save_model
from torch import nn

from treespec.cache import TreeLayer
from treespec.compiled import BUCKETS, Compiled, Room, padded, padded_mask
from treespec.draft.times import path
from treespec.errors import InputError
from treespec.heads.checkpoint import save_head
from treespec.packed import PackedLinear
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


@pytest.mark.parametrize(("buckets", "three"), [(True, Room(4, 8)), (False, Room(3, 6))])
def test_nodes_have_room_in_the_cache_or_there_is_none(buckets, three):
    compiled, layer = Compiled(lambda: None, torch.device("cpu"), "eager", buckets), TreeLayer(capacity=4)
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
    trees = [path(n, text[0]) for n in (1, 3, 8, 11)]
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
    """Two modules of a class in one process: generated code holds weights as constants."""
    cpu, layer, x = torch.device("cpu"), TreeLayer(capacity=8), torch.randn(1, 3, 4)
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    layer.update(x[None], x[None])
    layer.length = 3

    def step(module, layers, x):
        return module(x)

    with torch.inference_mode():
        compiled = Compiled(partial(step, one), cpu)
        beside = compiled.likewise(other, step, cpu)
        for forward, module in ((compiled, one), (beside, other), (compiled.likewise(other, step, cpu), other)):
            assert torch.allclose(forward([layer], forward.room(3, [layer]), x), module(x), atol=1e-6)


def test_one_graph_serves_all_sizes_but_a_single_node():
    """Through prompts and trees of many sizes and a cache that grows."""
    graphs = []

    def counting(graph, inputs, **options):
        graphs.append(graph)
        return graph.forward

    model = Target(random_model(CONFIGS["llama"]()))
    head = random_head(model)
    model.compile(counting)
    for tree in ("eagle", "chain:1", "2x3", "dynamic:nodes=12,depth=3"):
        spec = Spec(model, head, tree)
        for length in (1, 2, 3, 30):
            spec.generate(list(range(3, 3 + length)), max_new_tokens=9)
            spec.baseline().generate(list(range(3, 3 + length)), max_new_tokens=3)
    assert len(graphs) <= 2


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


def test_only_what_is_not_compiled_is_packed(tmp_path):
    """Packed weights have no place in generated code; the output embedding and, on a CPU, the head are beside it."""
    folder = str(save_model(tmp_path / "model"))
    save_head(random_head(Target.load(folder)), tmp_path / "head")
    spec = load(folder, str(tmp_path / "head"), dtype="bfloat16", compile=True)
    packs = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert isinstance(spec.target.model.get_output_embeddings(), PackedLinear) == packs
    assert isinstance(spec.head.fc, PackedLinear) == packs
    assert not any(isinstance(part, PackedLinear) for part in spec.target.decoder.modules())
