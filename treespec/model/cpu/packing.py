"""Replaces the layers of a model by packed ones on a CPU; on a GPU it joins projections that read the same input."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from treespec.kernels.library import load_kernels
from treespec.model.cpu.experts import PACKED
from treespec.model.cpu.packed_layers import has_own_code, pack_layer
from treespec.model.cpu.rotary import tabulate_angles
from treespec.model.quantization.layers import is_plain_weight

# Projections that read the same input.
JOINED_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Mamba reads this layer's weight without calling the layer.
PLAIN_LAYER = "dt_proj"


@torch.no_grad()
def pack(model: nn.Module) -> None:
    """Replace the linear layers, experts and norms of a model that can be packed.

    Layers are packed one at a time: the plain weight is freed before the next is packed, unless an
    embedding shares it. A layer under two names is packed once. In a model without weights on the CPU only norms
    are replaced, and linear layers that read the same input become one product.
    """
    on_cpu = any(weight.is_cpu for weight in model.parameters())
    replace_layers(model, lambda layer, _: pack_layer(layer, on_cpu))
    if on_cpu:
        if load_kernels() is not None:  # else the plain weights stay where they are
            copy_out_of_files(model)
            tabulate_angles(model)
        return
    for module in model.modules():
        for group in JOINED_PROJECTIONS:
            join([getattr(module, name, None) for name in group])


def replace_layers(model: nn.Module, replace: Callable[[Any, str], nn.Module]) -> None:
    """Replace the modules of a model that may be packed, one at a time: the weight of one is freed before the next.

    replace: returns the new module for a module and its name, or the module itself to keep it.
    """
    names_of_layers = list_module_names(model)
    while names_of_layers:
        layer, names = names_of_layers.popitem()  # popped, so that its weight can be freed
        replacement = replace(layer, names[0])
        if replacement is not layer:
            for name in names:
                model.set_submodule(name, replacement)


def copy_out_of_files(model: nn.Module) -> None:
    """Copy the weights that are left, such as embeddings and norms, out of the files that they were read from.

    A view of a mapped file keeps the whole file mapped, whose pages meters count as the process's memory.
    """
    for module in model.modules():
        if hasattr(module, PACKED):  # a packed router knows its weight's address
            continue
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_cpu or not is_plain_weight(parameter):
                continue
            if name != "packed":
                parameter.data = parameter.data.clone()


def list_module_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return the names of each module of a model that may be packed, in the model's order."""
    names_of_modules: defaultdict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        if name and not name.endswith(PLAIN_LAYER):
            names_of_modules[module].append(name)
    return names_of_modules


def join(layers: Sequence[Any]) -> None:
    """Merge linear layers that share an input (q/k/v, gate/up) into one matmul, computed when the first is called.

    layers: they stay as they are if one is None, no plain layer, or of another input size or device.
    """
    # 1. One weight of all layers.
    if not all(is_plain_linear(layer) for layer in layers):
        return
    inputs = {(layer.in_features, layer.weight.device) for layer in layers}
    if len(inputs) > 1:
        return
    sizes = [layer.out_features for layer in layers]
    weight = torch.cat([layer.weight for layer in layers])

    # 2. By layer, the last input and its part of the product, until that layer is called.
    pending: dict[int, tuple[Tensor, Tensor]] = {}

    def multiply(number: int, bias: Tensor | None, x: Tensor) -> Tensor:
        if number not in pending or pending[number][0] is not x:
            outputs = nn.functional.linear(x, weight).split(sizes, -1)
            for i, output in enumerate(outputs):
                pending[i] = (x, output)
        _, output = pending.pop(number)
        if bias is not None:
            output = output + bias
        return output

    # 3. Each layer's weight is a part of the whole one.
    for number, part in enumerate(weight.split(sizes)):
        layer = layers[number]
        layer.weight = nn.Parameter(part, requires_grad=False)
        layer.forward = partial(multiply, number, layer.bias)


def is_plain_linear(layer: Any) -> bool:
    """Whether a layer only multiplies by a plain weight, and adds a bias."""
    return type(layer) is nn.Linear and is_plain_weight(layer.weight) and has_own_code(layer)


def has_bfloat16_instructions() -> bool:
    """Whether this CPU has instructions for bfloat16 that oneDNN uses."""
    has_onednn = torch.backends.mkldnn.is_available()
    return has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
