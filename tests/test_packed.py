"""Packed weights multiply as plain ones, only where they may, and never all beside the plain ones."""

import weakref

import pytest
import torch
from models import CONFIGS, close, randn, random_model
from torch import nn
from training import save_model

from treespec.api.load import load
from treespec.draft.heads.loading import build_new_head
from treespec.heads.registry import HEAD_KINDS
from treespec.kernels import ops as kernels
from treespec.model.cpu import packing as packed
from treespec.model.cpu.packed_layers import pack_layer
from treespec.model.cpu.packing import pack
from treespec.model.target import Target

WITHIN = {torch.float32: 1e-5, torch.bfloat16: 1 / 128, torch.float16: 1 / 512}  # of the largest output: rounding


def linear(*sizes, bias=True, dtype=torch.float32):
    """A layer whose weight has values of 16 bits."""
    layer = nn.Linear(*sizes, bias=bias, dtype=dtype)
    layer.weight.data = layer.weight.data.bfloat16().to(dtype)
    return layer


@pytest.mark.parametrize("compiler", [True, False])
@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "shape, outputs",
    [
        *(((*rows, 48), 80) for rows in ((), (0,), (1,), (26,), (2, 3), (3, 70))),
        ((5, 1), 1),
        ((5, 7), 3),
        ((5, 1), 257),
    ],
)
def test_a_packed_layer_is_the_plain_one(monkeypatch, shape, outputs, bias, dtype, compiler):
    """Also for inputs with strides."""
    if not compiler:
        monkeypatch.setattr(kernels, "load_kernels", lambda: None)
    torch.manual_seed(0)
    plain = linear(shape[-1], outputs, bias=bias, dtype=dtype)
    x = torch.randn(*shape, 2, dtype=dtype)[..., 0]
    with torch.inference_mode():
        expected = plain(x).float()
        found = pack_layer(plain)(x)
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    error = (found.float() - expected).abs()
    assert bool((error <= WITHIN[dtype] * expected.abs().amax() if x.numel() else error == 0).all())


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_a_packed_head_takes_features_of_the_same_dtype(kind):
    """Weights in float32 with values of 16 bits may be packed as these; the head computes in float32."""
    head = build_new_head(kind, Target(random_model(CONFIGS["llama"]()))).eval()
    for weight in head.parameters():
        weight.data = weight.data.bfloat16().float()
    pack(head)
    assert head.dtype == torch.float32


@pytest.mark.parametrize("own", ["forward", "hook"])
def test_a_layer_that_does_more_than_multiply_stays(own):
    """compressed-tensors rounds the inputs of a plain linear layer in a forward that it gives to the layer."""
    model = nn.Sequential(nn.Linear(8, 4, dtype=torch.float32))
    x = randn(3, 8)
    if own == "hook":
        model[0].register_forward_pre_hook(lambda module, inputs: inputs[0].round())
    else:
        model[0].forward = lambda x: nn.Linear.forward(model[0], x.round())
    expected = model(x)
    pack(model)
    torch.testing.assert_close(model(x), expected)


def test_an_embedding_that_shares_its_weight_keeps_it():
    model = nn.Sequential(nn.Embedding(30, 16, dtype=torch.float32), nn.Linear(16, 30, bias=False, dtype=torch.float32))
    model[1].weight = model[0].weight
    before = model[0].weight.clone()
    with torch.inference_mode():
        expected = model(torch.arange(30))
        pack(model)
        close(model(torch.arange(30)), expected, 1e-6)
    assert torch.equal(model[0].weight, before)


def test_a_plain_weight_is_gone_before_the_next_is_packed(monkeypatch):
    """So that packing needs the memory of one layer, and not of all."""
    model = nn.Sequential(*(nn.Sequential(linear(8, 8), linear(8, 8)) for _ in range(3)))
    plain = [weakref.ref(module.weight) for module in model.modules() if type(module) is nn.Linear]
    alive = []

    def counted(linear, on_cpu):
        if isinstance(linear, nn.Linear):
            alive.append(sum(weight() is not None for weight in plain))
        return pack_layer(linear, on_cpu)

    monkeypatch.setattr(packed, "pack_layer", counted)
    pack(model)
    assert alive == [6, 5, 4, 3, 2, 1]
    assert not any(weight() is not None for weight in plain)


def test_a_model_that_treespec_loaded_may_be_given_to_load(tmp_path):
    first = load(save_model(tmp_path / "model"), dtype="bfloat16")
    second = load(first.target.model, drafter="suffix:tokens=0")
    prompt = [5, 6, 7, 8, 5, 6, 7, 8]
    said = [spec.generate(prompt, max_new_tokens=6).token_ids for spec in (first, second)]
    assert said[0] == said[1]


def test_other_dtypes_other_classes_and_hooked_layers_stay_as_they_are():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x).round()

    hooked = nn.Linear(4, 4, dtype=torch.float32)
    hooked._hf_hook = object()
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), Own(4, 4), hooked)
    before = list(model)
    pack(model)
    assert list(model) == before
