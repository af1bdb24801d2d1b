"""Weights in the order in which a CPU multiplies them, in 16 bits where those hold the values.

torch brings a bfloat16 weight into oneDNN's order at every call. Without AVX-512 it multiplies one
row after the other, and a float32 weight is twice as long to read. Here each weight is brought into
an order once, when a model is loaded to decode:

    weight                              layer             kept as          multiplied in
    bfloat16, AVX-512                   `PackedLinear`    bfloat16         bfloat16
    bfloat16, no AVX-512                `HalfLinear`      half precision   float32
    float32 with values of 16 bits      `HalfLinear`      half precision   float32
    float32 with values of its own      `nn.Linear`       float32          float32
"""

from collections import defaultdict
from typing import cast, final

import torch
from torch import Tensor, nn

from treespec.model.quantised import is_plain

OWN_USE = ("dt_proj",)  # Mamba multiplies by this layer's weight itself
EXACT = 2.0**-32  # of a layer's largest weight: float32 rounds products of that by 2^-25


@final
class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU by oneDNN. It holds the weight in blocked order alone."""

    def __init__(self, linear: nn.Linear, rows: int = 16) -> None:
        """rows: of the typical input; the order fits any number."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    @property
    def weight(self) -> nn.Parameter:
        """[out, in] in blocked order: it has a shape, dtype and device, and no plain values."""
        return self.packed

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], no gradient."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


@final
class HalfLinear(nn.Module):
    """`nn.Linear` for inference on a CPU by FBGEMM: half precision in memory, float32 in the product.

    A row of the output has the same bits for any number of rows.
    """

    def __init__(self, linear: nn.Linear, scale: float) -> None:
        """scale: power of two by which half precision holds the weight (`half_scale`)."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        bias = None if linear.bias is None else linear.bias.detach().float() * scale
        weight = linear.weight.detach().float() * scale
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        self.scale = scale
        # [out, in], without values: what asks for a shape, dtype or device reads it here.
        self.weight = torch.empty((), dtype=linear.weight.dtype).expand(linear.weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], no gradient."""
        rows = x.float().reshape(-1, self.in_features)  # FBGEMM takes no vector
        output = torch.ops.quantized.linear_dynamic_fp16(rows, self.packed)
        if self.scale != 1:
            output /= self.scale
        return output.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def pack(model: nn.Module) -> None:
    """Replace the linear layers of a model that can be packed; all others stay as they are.

    One layer at a time: its plain weight is freed before the next is packed, but for one that an
    embedding shares. A layer in two places is packed once.
    """
    places: defaultdict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        if name and isinstance(module, nn.Linear) and fits(module) and not name.endswith(OWN_USE):
            places[id(module)].append(name)
    del module  # the last one would stay
    for names in places.values():
        packed = packed_layer(cast(nn.Linear, model.get_submodule(names[0])))
        for name in names:
            model.set_submodule(name, packed)


def packed_layer(linear: nn.Linear) -> nn.Module:
    """The fastest layer with the values of a plain one: itself, or a packed one."""
    weight = linear.weight.detach()
    if weight.dtype == torch.bfloat16 and multiplies_bfloat16():
        return PackedLinear(linear)
    scale = half_scale(weight)
    return linear if scale is None else HalfLinear(linear, scale)


def half_scale(weight: Tensor) -> float | None:
    """A power of two by which half precision holds a weight's values; None if it does not here.

    Half precision has 11 significant bits, bfloat16 has 8. Only values below 2^-31 of the largest
    are rounded, by less than `EXACT`.
    """
    engine = torch.backends.quantized.engine
    if engine not in ("x86", "fbgemm") or weight.dtype == torch.float64 or not weight.numel():
        return None
    values = weight.float()
    largest = values.abs().max()
    for exponent in (0, 15 - int(torch.frexp(largest).exponent)):
        scaled = values * 2.0**exponent
        if (scaled.half().float() - scaled).abs().max() <= EXACT * largest * 2.0**exponent:
            return 2.0**exponent
    return None


def fits(module: nn.Linear) -> bool:
    """Plain, and in the CPU's memory for good.

    A layer with a forward or hooks of its own is more than its weight: compressed-tensors rounds
    inputs there, accelerate moves the weight.
    """
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and not (module._forward_pre_hooks or module._forward_hooks)
        and is_plain(module)  # torchao puts tensors of its own into plain modules
        and module.weight.device.type == "cpu"
        and not hasattr(module, "_hf_hook")
    )


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 that oneDNN uses."""
    has_onednn = torch.backends.mkldnn.is_available()
    return has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
