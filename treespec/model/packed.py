"""Weights in the order in which a CPU multiplies them, in 16 bits where those hold the values.

weight                              layer             kept as
with a C compiler, values of
    bfloat16 or half precision      `PackedLinear`    16 bits
    single precision                `PackedLinear`    32 bits
without one: bfloat16, AVX-512      `OneDnnLinear`    bfloat16
any other                           `nn.Linear`       as it is
"""

import inspect
from collections import defaultdict
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from treespec.model import kernels
from treespec.model.quantised import is_plain

OWN_USE = ("dt_proj",)  # Mamba multiplies by this layer's weight itself


@final
class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU by our kernels. It holds the packed weight alone.

    A row of the output has the same bits for any number of rows.
    """

    def __init__(self, linear: nn.Linear, form: int) -> None:
        """form: of the packed weight (`kernels.form_of`)."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = nn.Parameter(kernels.packed(linear.weight, form), requires_grad=False)
        self.bias, self.form = linear.bias, form
        # [out, in], without values: what asks for a shape, dtype or device reads it here.
        self.weight = torch.empty((), dtype=linear.weight.dtype).expand(linear.weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], no gradient."""
        return kernels.linear(
            x, self.packed, self.bias, (self.out_features, self.in_features), self.form
        )


@final
class OneDnnLinear(nn.Module):
    """`nn.Linear` for inference on a CPU by oneDNN. It holds the weight in blocked order alone."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        ordered = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 16)
        self.weight, self.bias = nn.Parameter(ordered, requires_grad=False), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], no gradient."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


@final
class PackedNorm(nn.Module):
    """A root mean square norm as one operation, where that gives what the model's own gives."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H], no gradient."""
        if x.dtype != self.weight.dtype:
            return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return kernels.rms_norm(x, self.weight, self.eps)


def packed_norm(norm: Any) -> nn.Module:
    """A norm of the model as one operation, or itself: found by trial, on numbers of many sizes."""
    weight, own = norm.weight, [value for value in vars(norm).values() if type(value) is float]
    takes_one = len(inspect.signature(norm.forward).parameters) == 1  # some take a gate too
    if weight.dtype not in kernels.HALF or weight.dim() != 1 or len(own) != 1 or not takes_one:
        return norm
    packed, random = PackedNorm(weight, own[0]), torch.Generator().manual_seed(0)
    x = torch.randn(16, len(weight), generator=random) * torch.logspace(-3, 3, 16)[:, None]
    x, rounding = x.to(weight.dtype), max(2 * torch.finfo(weight.dtype).eps, 1e-6)
    return packed if torch.allclose(packed(x), norm(x), rtol=rounding, atol=0) else norm


@torch.no_grad()
def pack(model: nn.Module) -> None:
    """Replace the linear layers and norms of a model that can be packed; others stay as they are.

    One layer at a time: its plain weight is freed before the next is packed, but for one that an
    embedding shares. A layer in two places is packed once.
    """
    places: defaultdict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        kind = "RMSNorm" in type(module).__name__ or isinstance(module, nn.Linear | Conv1D)
        if name and kind and fits(module) and not name.endswith(OWN_USE):
            places[module].append(name)
    del module  # the last one would stay
    while places:
        layer, names = places.popitem()
        packed = packed_layer(layer)
        for name in names:
            model.set_submodule(name, packed)


@torch.no_grad()
def packed_layer(layer: nn.Module) -> nn.Module:
    """The fastest layer with the values of a plain one: itself, or a packed one."""
    if not isinstance(layer, nn.Linear | Conv1D):
        return packed_norm(layer) if kernels.library() else layer
    linear = plain_linear(layer)
    if linear is None:
        return layer
    weight = linear.weight.detach()
    if kernels.library() and (form := kernels.form_of(weight)) is not None:
        return PackedLinear(linear, form)
    if weight.dtype == torch.bfloat16 and multiplies_bfloat16():
        return OneDnnLinear(linear)
    return layer


def plain_linear(layer: nn.Linear | Conv1D) -> nn.Linear | None:
    """A layer as a plain one, or None for a class that does more than to multiply (by trial)."""
    if type(layer) is nn.Linear:
        return layer
    weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
    with torch.device("meta"):
        plain = nn.Linear(weight.shape[1], weight.shape[0], layer.bias is not None)
    plain.weight, plain.bias = nn.Parameter(weight, requires_grad=False), layer.bias
    x = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    return plain if torch.allclose(layer(x), plain(x), rtol=0.02, atol=1e-3) else None


def fits(module: nn.Module) -> bool:
    """Plain, and in the CPU's memory for good.

    A layer with a forward or hooks of its own is more than its weight: compressed-tensors rounds
    inputs there, accelerate moves the weight.
    """
    return (
        "forward" not in vars(module)
        and not (module._forward_pre_hooks or module._forward_hooks)
        and is_plain(module)  # torchao puts tensors of its own into plain modules
        and module.get_parameter("weight").device.type == "cpu"
        and not hasattr(module, "_hf_hook")
    )


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 that oneDNN uses."""
    has_onednn = torch.backends.mkldnn.is_available()
    return has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
