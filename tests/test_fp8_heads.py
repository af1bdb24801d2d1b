"""Heads in fp8: the weights that load are the file's numbers times its factors, by another computation in float64."""

import numpy as np
import pytest
import torch
from commands import complains
from drafters import build_eagle3
from head_files import EAGLE3_CONFIG, write_head
from models import ones, rand, seeded
from training import change_json

from treespec.heads.checkpoint import load_head
from treespec.heads.formats.fp8 import dequantize_weights

BLOCK = [5, 7]
BY_BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": BLOCK}
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
INPUTS = WEIGHTS | {"dynamic": True, "strategy": "token"}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS, "output_activations": None}
BY_ROW = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}
BLOCKED_GROUP = GROUP | {"weights": WEIGHTS | {"strategy": "block", "block_structure": BLOCK}}
FORMS = {  # by name: quantization_config, the end of the factors' names, and their shape for a weight
    "blocks, as DeepSeek's": (BY_BLOCK, "_scale_inv", lambda n, m: (-(-n // 5), -(-m // 7))),
    "blocks of compressed-tensors": (
        BY_ROW | {"config_groups": {"group_0": BLOCKED_GROUP}},
        "_scale",
        lambda n, m: (-(-n // 5), -(-m // 7)),
    ),
    "rows of compressed-tensors": (BY_ROW, "_scale", lambda n, m: (n, 1)),
    "one of ModelOpt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "_scale", lambda n, m: ()),
    "one of AutoFP8": ({"quant_method": "fp8", "activation_scheme": "static"}, "_scale", lambda n, m: (1,)),
}


def quantize(tensors, name):
    """A head's matrices in fp8 with factors beside them, and what they stand for: [out, in] in float64."""
    _, ending, shape = FORMS[name]
    stored = {}
    wanted = {}
    for tensor, value in tensors.items():
        stored[tensor] = value
        if value.ndim < 2 or tensor == "embed_tokens.weight":
            continue
        factors = rand(shape(*value.shape), generator=seeded(len(stored))) + 0.01
        stored[tensor] = value.to(torch.float8_e4m3fn)
        stored[tensor + ending] = factors
        stored[tensor.replace("weight", "input_scale")] = torch.tensor(0.5, dtype=torch.float32)
        numbers = np.array(stored[tensor].double())
        wanted[tensor] = np.empty_like(numbers)
        for row, column in np.ndindex(numbers.shape):
            where = (row // 5, column // 7) if "blocks" in name else (row, 0)
            factor = factors[where] if factors.ndim == 2 else factors.reshape(())
            wanted[tensor][row, column] = numbers[row, column] * float(factor)
    return stored, wanted


@pytest.mark.parametrize("name", FORMS)
def test_weights_in_fp8_load_as_their_products_with_the_factors(name, tmp_path):
    stored, wanted = quantize(build_eagle3().state_dict(), name)
    config = EAGLE3_CONFIG | {"quantization_config": FORMS[name][0]}
    head = load_head(write_head(tmp_path / "head", config, stored))
    found = head.state_dict()
    assert len(wanted) == 9
    for tensor, value in wanted.items():
        np.testing.assert_allclose(found[tensor].double(), value, rtol=1e-7)
    assert "quantization_config" not in head.config


def test_weights_get_the_dtype_of_the_other_floats(tmp_path):
    """ModelOpt has a file of its own for the quantisation."""
    tensors = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in build_eagle3().state_dict().items()
    }  # not the head: its embedding is the target's
    stored, _ = quantize(tensors, "one of ModelOpt")
    loaded = load_head(write_head(tmp_path / "head", EAGLE3_CONFIG, stored))
    assert {value.dtype for value in loaded.state_dict().values() if value.is_floating_point()} == {torch.bfloat16}


REFUSED = {
    "another width": (
        {"config_groups": {"g": GROUP | {"weights": WEIGHTS | {"num_bits": 4}}}},
        "g.weights.num_bits is 4",
    ),
    "a rotation": ({"transform_config": {"config_groups": {"u": {}}}}, "quantization_config.transform_config is"),
    "another method": ({"quant_method": "gptq"}, "quantization_config.quant_method is 'gptq'"),
    "two sizes of blocks": (
        {"weight_block_size": [2, 2], "config_groups": {"g": BLOCKED_GROUP}},
        r"names blocks of \[\(2, 2\), \(5, 7\)\]: one size",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_quantisation_is_refused_by_name(name, tmp_path):
    changes, complaint = REFUSED[name]
    stored, _ = quantize(build_eagle3().state_dict(), "rows of compressed-tensors")
    folder = write_head(tmp_path / "head", EAGLE3_CONFIG | {"quantization_config": BY_ROW}, stored)
    assert load_head(folder).kind == "eagle3"
    change_json(folder, quantization_config=BY_ROW | changes)
    with complains(complaint):
        load_head(folder)


def test_factors_that_do_not_fit_a_weight_are_refused():
    weight = {"a.weight": ones(6, 9).to(torch.float8_e4m3fn)}
    for factors, block, complaint in (
        ({}, None, "a.weight is in fp8, and the file has not one of a.weight_scale_inv and a.weight_scale"),
        ({"a.weight_scale": ones(2, 2)}, None, "weight_block_size is missing"),
        ({"a.weight_scale": ones(2, 3)}, (5, 7), r"factors of a.weight are \[2, 3\], .* blocks \[5, 7\]"),
        ({"a.weight_scale": torch.ones(6, 1, dtype=torch.uint8)}, None, "are of torch.uint8: treespec reads floats"),
    ):
        with pytest.raises(ValueError, match=complaint):
            dequantize_weights(weight | factors, block)
