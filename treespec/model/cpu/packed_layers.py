"""Weights in the order in which a CPU multiplies them, in 16 bits if those hold the values exactly.

weight                              layer             kept as
with a C compiler, values of
    bfloat16 or half precision      `PackedLinear`    16 bits
    single precision                `PackedLinear`    32 bits
any other                           unchanged         unchanged

Each expert of a mixture is a `PackedLinear` too, and a router keeps its plain weight next to a packed one.
"""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from treespec.kernels import ops as kernels
from treespec.model.cpu.experts import (
    PACKED,
    matches_outputs,
    pack_router,
    pad_to_blocks,
    run_experts,
)
from treespec.model.quantization.layers import is_plain_weight


@final
class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU by our kernels. It holds only the packed weight.

    A row of the output has the same bits for any number of rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, form: int) -> None:
        """weight: [out, in]. form: of the packed weight (`treespec.kernels.ops.choose_form`)."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = nn.Parameter(kernels.pack_weight(weight, form), requires_grad=False)
        self.bias = bias
        self.form = form
        # [out, in], without values: other code reads shape, dtype and device here.
        self.weight = torch.empty((), dtype=weight.dtype).expand(weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], no gradient."""
        shape = self.out_features, self.in_features
        return kernels.multiply_packed(x, self.packed, self.bias, shape, self.form)


@final
class PackedNorm(nn.Module):
    """A root mean square norm as one operation; `pack_norm` has compared it with the model's norm."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H], no gradient."""
        if x.dtype != self.weight.dtype or not x.is_cpu:
            return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return kernels.apply_rms_norm(x, self.weight, self.eps)


def pack_norm(norm: Any) -> nn.Module:
    """Return a norm as one operation if a trial on numbers of many sizes agrees, else the norm itself."""
    weight = norm.weight
    if weight.dtype not in kernels.BFLOAT16_FLAGS or weight.dim() != 1:
        return norm
    constants = [value for value in vars(norm).values() if type(value) is float]
    arguments = inspect.signature(norm.forward).parameters
    if len(constants) != 1 or len(arguments) != 1:  # some take a gate too
        return norm
    packed = PackedNorm(weight, constants[0])
    random = torch.Generator().manual_seed(0)
    x = torch.randn(16, len(weight), generator=random) * torch.logspace(-3, 3, 16)[:, None]
    rounding = max(2 * torch.finfo(weight.dtype).eps, 1e-6)
    if matches_outputs(packed, norm, x.to(weight), rounding):
        return packed
    return norm


def has_own_code(layer: Any) -> bool:
    """Whether a layer runs only the code of its class: accelerate and others add hooks."""
    hooks = layer._forward_pre_hooks or layer._forward_hooks or hasattr(layer, "_hf_hook")
    return not hooks and "forward" not in vars(layer)


@torch.no_grad()
def pack_layer(layer: Any, on_cpu: bool = True) -> nn.Module:
    """Return a packed layer with the values of a plain one, or the layer itself if it cannot be packed.

    Subclasses, replaced forwards and hooks may do more than multiply: compressed-tensors rounds
    inputs there, accelerate moves the weight, torchao puts its tensor classes into plain modules.

    on_cpu: False: only norms are packed. Default: True.
    """
    # 1. Layers that stay, and norms.
    if not has_own_code(layer):
        return layer
    if on_cpu and not kernels.load_kernels():
        return layer
    weight = layer._parameters.get("weight")
    if "RMSNorm" in type(layer).__name__ and is_plain_weight(weight):
        return pack_norm(layer)
    if not on_cpu:
        return layer

    # 2. Activations, experts, linear layers and routers.
    if type(layer).__module__ == "transformers.activations":
        layer.forward = partial(pad_to_blocks, layer.forward)
    if has_plain_experts(layer):
        pack_experts(layer)
    if has_plain_matrix(layer):
        return pack_matrix(layer)
    return layer


def has_plain_experts(layer: Any) -> bool:
    """Whether a layer has transformers' interface of experts, with plain weights on the CPU."""
    if vars(layer).get("has_post_expert_norm") is not False:
        return False
    weights = layer.down_proj
    return is_plain_weight(weights) and weights.is_cpu


def has_plain_matrix(layer: Any) -> bool:
    """Whether a layer has a plain matrix on the CPU by which it may multiply: an embedding does not."""
    weight = layer._parameters.get("weight")
    if not is_plain_weight(weight) or isinstance(layer, nn.Embedding):
        return False
    return weight.is_cpu and weight.dim() == 2


def pack_matrix(layer: Any) -> nn.Module:
    """Return a packed linear layer. Another module may be a router: it stays, and multiplies by a packed weight.

    layer: its parameter `weight` is a plain matrix.
    """
    weight = layer._parameters["weight"]
    if isinstance(layer, Conv1D):
        weight = weight.T  # [in, out]
    form = kernels.choose_form(weight)
    if form is None:
        return layer
    packed = PackedLinear(weight, layer._parameters.get("bias"), form)
    if type(layer) in (nn.Linear, Conv1D):
        return packed
    # The weight of a subclass of `nn.Linear` may be read without a call of its forward.
    if not isinstance(layer, nn.Linear):
        pack_router(layer, packed)
    return layer


def pack_experts(experts: Any) -> None:
    """Pack the products of experts, and free their plain weights."""
    first = "up_proj"
    if experts.has_gate:
        first = "gate_up_proj"
    experts.products = nn.ModuleList()
    for name in (first, "down_proj"):
        weights = getattr(experts, name)  # [E, out, in]
        if experts.is_transposed:
            weights = weights.mT
        biases = getattr(experts, f"{name}_bias", [None] * len(weights))
        experts.products.append(pack_matrices(weights, biases))
        delattr(experts, name)
    experts.forward = partial(run_experts, experts)
    setattr(experts, PACKED, True)


def pack_matrices(weights: Tensor, biases: Tensor | Sequence[None]) -> nn.ModuleList:
    """Return a packed linear layer for each expert.

    weights: [E, out, in]. biases: [E, out], or E times None.
    """
    layers = nn.ModuleList()
    for weight, bias in zip(weights, biases, strict=True):
        form: Any = kernels.choose_form(weight)
        layers.append(PackedLinear(weight, bias, form))
    return layers
