"""Weights in the order in which a CPU multiplies them.

torch brings a bfloat16 weight into oneDNN's blocked order at every call, and multiplies a float32 one
in its plain order, which is slow for a few rows. Here each is brought into that order once, when a
model is loaded to decode.
"""

from collections import defaultdict
from typing import cast, final

import torch
from torch import Tensor, nn

from treespec.model.quantised import is_plain

OWN_USE = ("dt_proj",)  # Mamba multiplies by this layer's weight itself


@final
class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU. It holds the weight in blocked order alone."""

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


def pack(model: nn.Module) -> None:
    """Replace the linear layers of a model that can be packed; all others stay as they are.

    One layer at a time: its plain weight is freed before the next is packed, but for one that an
    embedding shares. A layer in two places is packed once.
    """
    if any(hasattr(module, "_rescale_layers") for module in model.modules()):
        return  # RWKV divides its weights in place, before its first forward
    places: defaultdict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        if name and isinstance(module, nn.Linear) and fits(module) and not name.endswith(OWN_USE):
            places[id(module)].append(name)
    del module  # the last one would stay
    for names in places.values():
        packed = PackedLinear(cast(nn.Linear, model.get_submodule(names[0])))
        for name in names:
            model.set_submodule(name, packed)


def fits(module: nn.Linear) -> bool:
    """Plain, of a dtype that this CPU packs, and in its memory for good.

    A layer with a forward or hooks of its own is more than its weight: compressed-tensors rounds
    inputs there, accelerate moves the weight.
    """
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and not (module._forward_pre_hooks or module._forward_hooks)
        and is_plain(module)  # torchao puts tensors of its own into plain modules
        and module.weight.device.type == "cpu"
        and packable(module.weight.dtype)
        and not hasattr(module, "_hf_hook")
    )


def packable(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies packed weights of this dtype here."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
