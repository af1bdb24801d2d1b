"""Tabulated angles of a rotary embedding are those that its module computes."""

import copy

import pytest
import torch
import transformers as hf
from models import zeros

from treespec.model.cpu.rotary import MOST_POSITIONS, TabulatedAngles, tabulate_angles

WIDTH = 16


def build_rotary(kind="default", **options):
    config = hf.LlamaConfig(
        hidden_size=2 * WIDTH,
        num_attention_heads=2,
        rope_parameters={"rope_type": kind, "rope_theta": 1e4, **options},
    )
    return hf.models.llama.modeling_llama.LlamaRotaryEmbedding(config)


def build_pair(kind="default", **options):
    plain = build_rotary(kind, **options)
    tabulated = copy.deepcopy(plain)
    tabulate_angles(tabulated)
    return plain, tabulated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tabulated_angles_are_those_of_the_module(dtype):
    plain, tabulated = build_pair("linear", factor=2.0)
    assert isinstance(tabulated.forward, TabulatedAngles)
    x = torch.zeros(2, 3, 4, dtype=dtype)
    for positions in ([[0, 1, 2], [7, 7, 9]], [[5000, 3, 4], [0, 0, 0]], [[MOST_POSITIONS, 1, 2], [3, 4, 5]]):
        ids = torch.tensor(positions)
        for expected, found in zip(plain(x, ids), tabulated(x, ids), strict=True):
            assert found.shape == (2, 3, WIDTH)
            assert torch.equal(found, expected)


def test_a_change_of_the_frequencies_changes_the_angles():
    x = zeros(1, 3, 4)
    ids = torch.tensor([[1, 5, 900]])

    def replace(module):
        module.inv_freq = 2 * module.inv_freq

    changes = [
        replace,
        lambda module: module.inv_freq.mul_(3),
        lambda module: setattr(module, "attention_scaling", 0.5),
        lambda module: module.half(),
    ]
    for change in changes:
        plain, tabulated = build_pair()
        before = tabulated(x, ids)[0]
        for module in (plain, tabulated, copied := copy.deepcopy(tabulated)):
            change(module)
        expected = plain(x, ids)[0]
        assert not torch.equal(expected, before)
        assert torch.equal(tabulated(x, ids)[0], expected)
        assert torch.equal(copied(x, ids)[0], expected)


def test_angles_that_follow_the_length_of_the_text_are_not_tabulated():
    _, tabulated = build_pair("dynamic", factor=2.0)
    assert "forward" not in vars(tabulated)


def test_angles_as_complex_numbers_are_not_tabulated():
    config = hf.Llama4TextConfig(hidden_size=2 * WIDTH, num_attention_heads=2, head_dim=WIDTH)
    rotary = hf.models.llama4.modeling_llama4.Llama4TextRotaryEmbedding(config)
    tabulate_angles(rotary)
    assert "forward" not in vars(rotary)
