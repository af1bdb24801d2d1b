"""Packed weights multiply as plain ones, only where they may, and never all beside the plain ones."""

import copy
import weakref

import pytest
import torch
from models import save_model, target
from torch import nn

from treespec.model import packed
from treespec.model.packed import PackedLinear, pack, packable
from treespec.spec import load

WITHIN = {torch.float32: 1e-5, torch.bfloat16: 1 / 128}  # of the largest output: rounding
DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not packable(dtype), reason=f"this CPU packs no {dtype}"))
    for dtype in WITHIN
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(48,), (0, 48), (1, 48), (26, 48), (2, 3, 48), (3, 70, 48)])
def test_a_packed_layer_is_the_plain_one(shape, bias, dtype):
    torch.manual_seed(0)
    plain, x = nn.Linear(48, 80, bias=bias, dtype=dtype), torch.randn(shape, dtype=dtype)
    with torch.inference_mode():
        expected, found = plain(x).float(), PackedLinear(plain)(x).float()
    assert found.shape == expected.shape
    assert bool(((found - expected).abs() <= WITHIN[dtype] * expected.abs().amax() if x.numel() else found == 0).all())


@pytest.mark.parametrize("sizes", [(1, 1), (7, 3), (64, 1), (1, 257), (576, 192)])
def test_sizes_and_strides_do_not_matter(sizes):
    torch.manual_seed(0)
    plain, x = nn.Linear(*sizes), torch.randn(5, 2 * sizes[0])[:, ::2]
    with torch.inference_mode():
        assert torch.allclose(PackedLinear(plain)(x), plain(x), atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_model_has_the_logits_of_the_plain_one(dtype):
    """One text, a batch, and more rows than a cycle has."""
    model = copy.deepcopy(target("llama").model).to(dtype)
    texts = [torch.arange(3, 20)[None], torch.arange(3, 27).view(4, 6), torch.arange(40)[None].repeat(3, 1) % 30]
    with torch.inference_mode():
        plain = [model(text).logits.float() for text in texts]
        pack(model)
        found = [model(text).logits.float() for text in texts]
    assert isinstance(model.lm_head, PackedLinear)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    for one, other in zip(plain, found, strict=True):
        assert (one - other).abs().max() <= 4 * WITHIN[dtype] * one.abs().max()


@pytest.mark.parametrize("own", ["forward", "hook"])
def test_a_layer_that_does_more_than_multiply_stays(own):
    """compressed-tensors rounds the inputs of a plain linear layer in a forward that it gives to the layer."""
    model, x = nn.Sequential(nn.Linear(8, 4)), torch.randn(3, 8)
    if own == "hook":
        model[0].register_forward_pre_hook(lambda module, inputs: inputs[0].round())
    else:
        model[0].forward = lambda x: nn.Linear.forward(model[0], x.round())
    expected = model(x)
    pack(model)
    torch.testing.assert_close(model(x), expected)


def test_an_embedding_that_shares_its_weight_keeps_it():
    model = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 30, bias=False))
    model[1].weight = model[0].weight
    before = model[0].weight.clone()
    with torch.inference_mode():
        expected = model(torch.arange(30))
        pack(model)
        assert torch.allclose(model(torch.arange(30)), expected, atol=1e-6)
    assert torch.equal(model[0].weight, before)


def test_a_layer_in_two_places_is_packed_once():
    layer = nn.Linear(8, 8)
    model = nn.ModuleDict({"one": nn.Sequential(layer), "other": layer})
    pack(model)
    assert isinstance(model["other"], PackedLinear)
    assert model["one"][0] is model["other"]


def test_a_plain_weight_is_gone_before_the_next_is_packed(monkeypatch):
    """So that packing needs the memory of one layer, and not of all."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)))
    plain = [weakref.ref(module.weight) for module in model.modules() if type(module) is nn.Linear]
    alive = []

    def counted(linear):
        alive.append(sum(weight() is not None for weight in plain))
        return PackedLinear(linear)

    monkeypatch.setattr(packed, "PackedLinear", counted)
    pack(model)
    assert alive == [6, 5, 4, 3, 2, 1]
    assert not any(weight() is not None for weight in plain)


def test_a_model_that_treespec_loaded_may_be_given_to_load(tmp_path):
    first = load(save_model(tmp_path / "model"), dtype="float32")
    second = load(first.target.model, drafter="lookup")
    prompt = [5, 6, 7, 8, 5, 6, 7, 8]
    said = [spec.generate(prompt, max_new_tokens=6).token_ids for spec in (first, second)]
    assert said[0] == said[1]


def test_other_dtypes_other_classes_and_hooked_layers_stay_as_they_are():
    class Own(nn.Linear):
        pass

    hooked = nn.Linear(4, 4)
    hooked._hf_hook = object()
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), Own(4, 4), hooked)
    before = list(model)
    pack(model)
    assert list(model) == before
