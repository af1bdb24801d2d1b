"""Rounds a model's products to eight bits on a CPU (`--load-in q8`), as llama.cpp's Q8_0 does.

Linear layers, the output layer and experts are rounded. Embeddings, norms and routers stay as they are. A GGUF file in
Q8_0 is packed as it is stored.
"""

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from treespec.errors import InputError
from treespec.kernels.checks import KernelInputError
from treespec.kernels.eight_bits import BLOCK_NUMBERS, dequantize_blocks, quantize_blocks
from treespec.kernels.library import find_kernels
from treespec.kernels.ops import EIGHT_BITS
from treespec.model.cpu.packed_layers import (
    PackedLinear,
    has_own_code,
    has_plain_experts,
    has_plain_matrix,
    pack_experts,
)
from treespec.model.cpu.packing import PLAIN_LAYER, list_module_names


def quantize_model(model: nn.Module) -> None:
    """Replace the products of a model by ones in eight bits.

    Raises:
        InputError: the kernels are off, a weight is not on the CPU, or a layer has another width or dtype.
    """
    # 1. What would go wrong.
    kernels = find_kernels()
    if kernels.library is None:
        reason = kernels.obstacle
        raise InputError(f"--load-in q8 is computed by the C kernels, which are off: {reason}")
    devices = {str(weight.device) for weight in model.parameters()} - {"cpu"}
    if devices:
        raise InputError(
            f"--load-in q8 is for a CPU, and weights are on {min(devices)}: "
            "add --device-map cpu, or take int8"
        )
    for name, module in model.named_modules():
        check_block_width(name, module)

    # 2. The layers.
    if not quantize_layers(model):
        kind = type(model).__name__
        raise InputError(f"--load-in q8: {kind} has no linear layers with plain weights")


def check_block_width(name: str, module: nn.Module) -> None:
    """Raise InputError unless the inputs of a module's products fill whole blocks. name: of the module."""
    for inputs in list_input_widths(module):
        if inputs % BLOCK_NUMBERS and not name.endswith(PLAIN_LAYER):
            raise InputError(
                f"--load-in q8: {name} has {inputs} inputs, no multiple of {BLOCK_NUMBERS}: take another form"
            )


@torch.no_grad()
def quantize_layers(model: nn.Module) -> int:
    """Replace the products of a model whose inputs fill whole blocks, one layer at a time; others stay.

    Returns how many layers were replaced. Raises InputError for numbers that eight bits do not hold.
    """
    names_of_layers = list_module_names(model)
    count = 0
    while names_of_layers:
        layer, names = names_of_layers.popitem()  # popped, so that its weight can be freed
        widths = list_input_widths(layer)
        if not widths or any(inputs % BLOCK_NUMBERS for inputs in widths):
            continue
        count += 1
        try:
            quantized = quantize_layer(layer)
        except KernelInputError as error:
            raise InputError(f"--load-in q8: {names[0]}: {error}") from error
        for name in names:
            model.set_submodule(name, quantized)
    return count


def keep_eight_bits(model: nn.Module) -> None:
    """Pack the products of a model as a Q8_0 file stored them, if all of them come from such blocks.

    transformers unpacks the blocks to float32, which holds their values exactly, and rounding these gives the same
    blocks again. Other models stay as they are.
    """
    if find_kernels().library is None:
        return
    products = [module for module in model.modules() if list_input_widths(module)]
    if products and all(holds_eight_bits(product) for product in products):
        quantize_layers(model)


def holds_eight_bits(layer: Any) -> bool:
    """Whether a linear layer's weight is exactly that of blocks in eight bits; False for experts."""
    if type(layer) is not nn.Linear or layer.weight.dtype != torch.float32:
        return False
    if layer.in_features % BLOCK_NUMBERS:
        return False
    for rows in (layer.weight[:1], layer.weight):  # most other weights differ in the first row
        try:
            blocks = quantize_blocks(rows)
        except KernelInputError:  # infinite numbers
            return False
        if not torch.equal(dequantize_blocks(blocks), rows):
            return False
    return True


def list_input_widths(layer: Any) -> list[int]:
    """List the inputs of each product of a layer that eight bits can replace; [] for other layers."""
    if not has_own_code(layer):
        return []
    if has_plain_experts(layer):
        first = layer.gate_up_proj if layer.has_gate else layer.up_proj
        dimension = -2 if layer.is_transposed else -1  # of [E, in, out] or [E, out, in]
        return [first.shape[dimension], layer.down_proj.shape[dimension]]
    if not has_plain_matrix(layer):
        return []
    if type(layer) is nn.Linear:
        return [layer.weight.shape[1]]
    if isinstance(layer, Conv1D):
        return [layer.weight.shape[0]]
    return []


def quantize_layer(layer: Any) -> nn.Module:
    """Return a linear layer in eight bits, or the module of experts, whose products are now.

    Raises KernelInputError.
    """
    if has_plain_experts(layer):
        pack_experts(layer, EIGHT_BITS)
        return layer
    weight = layer.weight
    if isinstance(layer, Conv1D):
        weight = weight.T  # [in, out]
    return PackedLinear(weight, layer.bias, EIGHT_BITS)
