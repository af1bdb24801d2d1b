"""Weights in the order in which a CPU multiplies them.

torch brings a bfloat16 weight into oneDNN's blocked order at every call, which for a few rows takes as long as to
multiply. Here that is done once, when a model is loaded to decode.
"""

from typing import final

import torch
from torch import Tensor, nn


@final
class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU in bfloat16. It holds the weight in blocked order alone."""

    def __init__(self, linear: nn.Linear, rows: int = 16) -> None:
        """rows: of the typical input; the order fits any number."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], no gradient."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack(model: nn.Module) -> None:
    """Replace the linear layers of a model that lie on a CPU in bfloat16; all others stay as they are."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and fits(child):
                setattr(parent, name, PackedLinear(child))


def fits(module: nn.Linear) -> bool:
    """Plain, in bfloat16 and in this machine's memory for good: accelerate moves what has a hook."""
    return (
        type(module) is nn.Linear
        and module.weight.dtype == torch.bfloat16
        and module.weight.device.type == "cpu"
        and not hasattr(module, "_hf_hook")
    )
