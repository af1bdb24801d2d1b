"""Packed weights multiply as plain ones, and only where they may."""

import copy

import pytest
import torch
from models import target
from torch import nn

from treespec.model.packed import PackedLinear, pack

supported = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU does not multiply bfloat16 in oneDNN"
)


@supported
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 48), (26, 48), (2, 3, 48)])
def test_a_packed_layer_is_the_plain_one(shape, bias):
    """bfloat16 keeps 8 bits: within one part in 128 of the largest output."""
    torch.manual_seed(0)
    plain = nn.Linear(48, 80, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(shape).bfloat16()
    with torch.inference_mode():
        expected, found = plain(x).float(), PackedLinear(plain)(x).float()
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= expected.abs().max() / 128


@supported
def test_a_packed_model_has_the_features_of_the_plain_one():
    model, text = copy.deepcopy(target("llama").model).to(torch.bfloat16), torch.arange(3, 20)[None]
    with torch.inference_mode():
        plain = model(text).logits.float()
        pack(model)
        packed = model(text).logits.float()
    assert isinstance(model.lm_head, PackedLinear)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    assert (plain - packed).abs().max() <= plain.abs().max() / 32


def test_float32_other_classes_and_hooked_layers_stay_as_they_are():
    class Own(nn.Linear):
        pass

    hooked = nn.Linear(4, 4, dtype=torch.bfloat16)
    hooked._hf_hook = object()
    model = nn.Sequential(nn.Linear(4, 4), Own(4, 4, dtype=torch.bfloat16), hooked)
    before = list(model)
    pack(model)
    assert list(model) == before
