"""Weights in the order in which a CPU multiplies them, in 16 bits where those hold the values.

weight                              layer             kept as
with a C compiler, values of
    bfloat16 or half precision      `PackedLinear`    16 bits
    single precision                `PackedLinear`    32 bits
any other                           its own           as it is
"""

import inspect
from collections import defaultdict
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from treespec.model import kernels
from treespec.model.experts import blocked_activation, pack_router, packed_experts
from treespec.model.quantised import is_plain

OWN_USE = ("dt_proj",)  # Mamba multiplies by this layer's weight itself


@final
class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU by our kernels. It holds the packed weight alone.

    A row of the output has the same bits for any number of rows.
    """

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, form: int) -> None:
        """weight: [out, in]. form: of the packed weight (`kernels.form_of`)."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = nn.Parameter(kernels.packed(weight, form), requires_grad=False)
        self.bias, self.form = bias, form
        # [out, in], without values: what asks for a shape, dtype or device reads it here.
        self.weight = torch.empty((), dtype=weight.dtype).expand(weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], no gradient."""
        shape = self.out_features, self.in_features
        return kernels.linear(x, self.packed, self.bias, shape, self.form)


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
        if name and not name.endswith(OWN_USE):
            places[module].append(name)
    del module  # the last one would stay
    while places:
        layer, names = places.popitem()
        packed = packed_layer(layer)
        for name in names if packed is not layer else ():
            model.set_submodule(name, packed)


@torch.no_grad()
def packed_layer(layer: Any) -> nn.Module:
    """A packed layer with the values of a plain one, or the layer itself.

    A class of its own, a forward or hooks may do more than to multiply: compressed-tensors rounds
    inputs there, accelerate moves the weight, torchao puts tensors of its own into plain modules.
    """
    hooks = layer._forward_pre_hooks or layer._forward_hooks or hasattr(layer, "_hf_hook")
    if hooks or "forward" in vars(layer) or not kernels.library():
        return layer
    if not any(True for _ in (*layer.parameters(), *layer.buffers())):
        return blocked_activation(layer)
    if "down_proj" in layer._parameters:
        return packed_experts(layer)
    if not is_plain(layer) or not layer.weight.is_cpu:
        return layer
    if "RMSNorm" in type(layer).__name__:
        return packed_norm(layer)
    if isinstance(layer, nn.Linear | Conv1D):
        return packed_linear(layer)
    if layer.weight.dim() == 2 and not isinstance(layer, nn.Embedding):
        pack_router(layer)
    return layer


def packed_linear(layer: nn.Linear | Conv1D) -> nn.Module:
    """A packed linear layer, or the layer itself where its class does more than to multiply.

    A class of its own is tried on random rows: it may round the inputs, for example.
    """
    # 1. Parts of a class without a forward are multiplied by elsewhere, as in attention of torch.
    weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
    form, is_own = kernels.form_of(weight), type(layer) not in (nn.Linear, Conv1D)
    if form is None or (is_own and "forward" not in vars(type(layer))):
        return layer
    packed = PackedLinear(weight, layer.bias, form)
    if not is_own:
        return packed

    # 2. Errors: two roundings of the result, and those of the sum.
    x = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    try:
        found = layer(x)
    except Exception:  # a model's own code may raise anything
        return layer
    if not isinstance(found, Tensor):
        pack_router(layer)
        return layer
    exact, sizes = packed(x.float()), x.float().abs() @ weight.float().abs().T
    allowed = 2 * torch.finfo(weight.dtype).eps * exact.abs() + 1e-5 * sizes
    return packed if bool(((found - exact).abs() <= allowed).all()) else layer


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 that oneDNN uses."""
    has_onednn = torch.backends.mkldnn.is_available()
    return has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
