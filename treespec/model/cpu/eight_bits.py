"""Rounds a model's products to eight bits on a CPU (`--load-in q8`), as llama.cpp's Q8_0 does, or to four (`q4`, Q4_0).

Linear layers, experts, the output layer and the embedding are rounded; by `q4` the last two have eight bits. Norms,
routers and embeddings that do more than copy rows stay as they are.
"""

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from treespec.errors import InputError
from treespec.kernels.checks import KernelInputError
from treespec.kernels.eight_bits import BLOCK_NUMBERS
from treespec.kernels.library import find_kernels
from treespec.kernels.ops import Q4_0, Q8_0
from treespec.model.cpu.packed_embedding import EMBEDDING_PRODUCT, replace_products
from treespec.model.cpu.packed_layers import (
    PackedLinear,
    has_own_code,
    has_plain_experts,
    has_plain_matrix,
    pack_experts,
)
from treespec.model.cpu.packing import PLAIN_LAYER
from treespec.options import ROUNDED_HERE

FORMS_OF_NAMES = dict(zip(ROUNDED_HERE, (Q8_0, Q4_0), strict=True))


def quantize_model(model: Any, name: str = "q8") -> None:
    """Replace the products of a model by ones in eight or four bits.

    name: of the form, as `--load-in` takes it.

    Raises:
        InputError: the kernels are off, a weight is not on the CPU, or a layer has another width or dtype.
    """
    # 1. What would go wrong.
    kernels = find_kernels()
    if kernels.library is None:
        reason = kernels.obstacle
        raise InputError(f"--load-in {name} is computed by the C kernels, which are off: {reason}")
    devices = {str(weight.device) for weight in model.parameters()} - {"cpu"}
    if devices:
        raise InputError(
            f"--load-in {name} is for a CPU, and weights are on {min(devices)}: "
            "add --device-map cpu, or take int8"
        )
    for layer_name, module in model.named_modules():
        check_block_width(layer_name, module, name)

    # 2. The layers.
    if not quantize_layers(model, name):
        kind = type(model).__name__
        raise InputError(f"--load-in {name}: {kind} has no linear layers with plain weights")


def check_block_width(name: str, module: nn.Module, form_name: str) -> None:
    """Raise InputError unless the inputs of a module's products fill whole blocks.

    name: of the module. form_name: as for `quantize_model`.
    """
    for inputs in list_input_widths(module):
        if inputs % BLOCK_NUMBERS and not name.endswith(PLAIN_LAYER):
            raise InputError(
                f"--load-in {form_name}: {name} has {inputs} inputs, no multiple of {BLOCK_NUMBERS}: "
                "take another form"
            )


@torch.no_grad()
def quantize_layers(model: Any, name: str = "q8") -> int:
    """Replace the products of a model whose inputs fill whole blocks, one layer at a time; others stay.

    name: as for `quantize_model`.

    Returns how many layers were replaced. Raises InputError for numbers that blocks do not hold.
    """
    output_layer = None
    if hasattr(model, "get_output_embeddings"):
        output_layer = model.get_output_embeddings()
    quantized_names = []

    def quantize(layer: Any, layer_name: str) -> nn.Module:
        widths = list_input_widths(layer)
        if not widths or any(inputs % BLOCK_NUMBERS for inputs in widths):
            return layer
        quantized_names.append(layer_name)
        form = FORMS_OF_NAMES[name]
        if layer is output_layer or layer_name == EMBEDDING_PRODUCT:
            form = Q8_0
        try:
            return quantize_layer(layer, form)
        except KernelInputError as error:
            raise InputError(f"--load-in {name}: {layer_name}: {error}") from error

    replace_products(model, quantize)
    return len(quantized_names)


def list_input_widths(layer: Any) -> list[int]:
    """List the inputs of each product of a layer that blocks can replace; [] for other layers."""
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


def quantize_layer(layer: Any, form: int) -> nn.Module:
    """Return a linear layer in a form of `BLOCK_BYTES`, or the module of experts, whose products are now.

    Raises KernelInputError.
    """
    if has_plain_experts(layer):
        pack_experts(layer, form)
        return layer
    weight = layer.weight
    if isinstance(layer, Conv1D):
        weight = weight.T  # [in, out]
    return PackedLinear(weight, layer.bias, form)


def has_block_products(model: nn.Module) -> bool:
    """Whether a model has products in eight or four bits."""
    return any(type(module) is PackedLinear and module.is_rounded for module in model.modules())
