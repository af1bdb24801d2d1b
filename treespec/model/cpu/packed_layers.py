"""Weights in the order in which a CPU multiplies them, in 16 bits if those hold the values exactly.

weight                              layer             kept as
with a C compiler, values of
    bfloat16 or half precision      `PackedLinear`    16 bits
    single precision                `PackedLinear`    32 bits
    any precision, by --load-in q8  `PackedLinear`    8 bits, rounded (`cpu.eight_bits`); q4: 4 bits
    a GGUF file's blocks            `PackedLinear`    as stored (`cpu.stored_blocks`)
any other                           unchanged         unchanged

Each expert of a mixture is a `PackedLinear` too, and a router keeps its plain weight next to a packed one.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from treespec.kernels import ops as kernels
from treespec.kernels.checks import KernelInputError
from treespec.kernels.eight_bits import (
    dequantize_blocks,
    pack_blocks,
    quantize_blocks,
    unpack_blocks,
)
from treespec.model.cpu.experts import (
    PACKED,
    load_experts,
    matches_outputs,
    pack_router,
    pad_to_blocks,
    run_experts,
    save_experts,
)
from treespec.model.quantization.layers import is_plain_weight


@final
class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU by our kernels. It holds only the packed weight.

    A row of the output has the same bits for any number of rows. To code outside, it is a linear layer in float32,
    bfloat16 or half precision: `weight` and `state_dict` unpack, loading and a change of dtype pack again. A layer in
    eight or four bits shows its values in float32; what is loaded into it is rounded, and a change of dtype changes
    only its bias.

    Attributes:
        packed: the weight in the order of the kernels.
        bias: [out]; None: no bias.
        dtype: of the weight that was packed.
        form: of the packed weight (`treespec.kernels.ops.choose_form`, or a key of `BLOCK_BYTES`).
    """

    packed: nn.Parameter

    def __init__(
        self, weight: Tensor, bias: Tensor | None, form: int, blocks: Tensor | None = None
    ) -> None:
        """Packs a weight.

        Args:
            weight: [out, in].
            bias: [out]; None: no bias.
            form: of the packed weight.
            blocks: [out, in / 32, bytes] uint8, whose values the weight has. Default: the weight is rounded to blocks.
        """
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.dtype = weight.dtype
        self.form = form
        if blocks is None:
            self.pack_weight(weight)
        else:
            self.packed = nn.Parameter(pack_blocks(blocks, form).numbers, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]. Only a layer of blocks has a gradient: that of its weight's values."""
        if self.is_rounded and x.requires_grad and torch.is_grad_enabled():
            return RoundedProduct.apply(x, self)
        return kernels.multiply_packed(x, self.read_weight(), self.bias)

    def read_weight(self) -> kernels.PackedWeight:
        """Returns the packed weight, as the kernels take it."""
        return kernels.PackedWeight(self.packed, self.out_features, self.in_features, self.form)

    @property
    def is_rounded(self) -> bool:
        """Whether the weight is in blocks of eight or four bits; the rows are rounded to eight then."""
        return self.form in kernels.BLOCK_BYTES

    @property
    def value_dtype(self) -> torch.dtype:
        """The dtype of `weight`, which holds its values exactly (those of Q4_1 as GGUF's readers round them)."""
        if self.is_rounded:
            return torch.float32
        return self.dtype

    @property
    def weight(self) -> Tensor:
        """[out, in], a copy: a change of it does not change the layer."""
        if self.is_rounded:
            return dequantize_blocks(unpack_blocks(self.read_weight()), self.form)
        return kernels.unpack_weight(self.read_weight()).to(self.dtype)

    def copy_rows(self, rows: Tensor) -> nn.Linear:
        """Copies rows [N] of weight and bias to a plain linear layer of the layer's dtype."""
        copied = nn.Linear(self.in_features, len(rows), self.bias is not None, device="meta")
        weight = self.weight[rows.to("cpu")].to(self.dtype)
        copied.weight = nn.Parameter(weight, requires_grad=False)
        if self.bias is not None:
            copied.bias = nn.Parameter(self.bias[rows.to("cpu")], requires_grad=False)
        return copied

    def pack_weight(self, weight: Tensor) -> None:
        """Replaces the weight [out, in]; its dtype becomes that of the layer."""
        form = kernels.choose_form(weight)
        if form is None or weight.shape != (self.out_features, self.in_features):
            raise KernelInputError(
                f"a packed layer of {self.out_features} outputs and {self.in_features} inputs cannot take a weight "
                f"{tuple(weight.shape)} of {weight.dtype}"
            )
        if self.is_rounded:
            packed = pack_blocks(quantize_blocks(weight, self.form), self.form)
        else:
            packed = kernels.pack_weight(weight, form)
            self.dtype = weight.dtype
            self.form = form
        self.packed = nn.Parameter(packed.numbers, requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedLinear":
        """Applies `fn` of `Module.to`, `float` and the like: another dtype packs again, another device is refused."""
        probe = fn(torch.empty(0, dtype=self.dtype, device="cpu"))
        if probe.device.type != "cpu":
            raise KernelInputError(
                f"this model's weights are packed for a CPU: to use {probe.device}, load it there (--device-map)"
            )
        if probe.dtype != self.dtype and not self.is_rounded:
            self.pack_weight(fn(self.weight))
        self.dtype = probe.dtype
        if self.bias is not None:
            bias = fn(self.bias.detach())
            self.bias = nn.Parameter(bias, requires_grad=False)
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Tensor], prefix: str, keep_vars: bool
    ) -> None:
        """Writes `weight` and `bias`, as `nn.Linear` does."""
        destination[f"{prefix}weight"] = self.weight
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Reads `weight` and `bias`, as `nn.Linear` does, in the layer's dtype."""
        wanted: dict[str, tuple[int, ...]] = {
            f"{prefix}weight": (self.out_features, self.in_features)
        }
        if self.bias is not None:
            wanted[f"{prefix}bias"] = (self.out_features,)
        for name, shape in wanted.items():
            if name not in state_dict:
                if strict:
                    missing_keys.append(name)
                continue
            value = state_dict[name]
            if value.shape != shape:
                error_msgs.append(f"size mismatch for {name}: {tuple(value.shape)}, not {shape}")
                continue
            if name.endswith("weight"):
                self.pack_weight(value.detach().to("cpu", self.value_dtype))
            else:
                bias = value.detach().to("cpu", self.dtype, copy=True)
                self.bias = nn.Parameter(bias, requires_grad=False)
        for name in state_dict:
            below = name.removeprefix(prefix)
            if strict and name.startswith(prefix) and "." not in below and name not in wanted:
                unexpected_keys.append(name)


@final
class RoundedProduct(torch.autograd.Function):
    """A product in eight or four bits, whose gradient is that of the product by the weight's values."""

    @staticmethod
    def forward(context: Any, x: Tensor, layer: PackedLinear) -> Tensor:
        """[..., in] -> [..., out]."""
        context.layer = layer
        return kernels.multiply_packed(x.detach(), layer.read_weight(), layer.bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """[..., out] -> [..., in]."""
        return gradient @ context.layer.weight.to(gradient.dtype), None


@final
class PackedNorm(nn.Module):
    """A root mean square norm as one operation; `pack_norm` has compared it with the model's norm."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H], no gradient."""
        dtype = self.weight.dtype
        if x.dtype != dtype or not x.is_cpu or dtype not in kernels.BFLOAT16_FLAGS:
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
    x = torch.randn(16, len(weight), generator=random, dtype=torch.float32, device="cpu")
    x *= torch.logspace(-3, 3, 16, dtype=torch.float32, device="cpu")[:, None]
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


def pack_experts(experts: Any, form: int | None = None) -> None:
    """Pack the products of experts, and free their plain weights. form: of all; None: as `choose_form` says."""
    first = "up_proj"
    if experts.has_gate:
        first = "gate_up_proj"
    experts.products = nn.ModuleList()
    experts.packed_names = (first, "down_proj")
    for name in experts.packed_names:
        weights = getattr(experts, name)  # [E, out, in]
        if experts.is_transposed:
            weights = weights.mT
        biases = getattr(experts, f"{name}_bias", [None] * len(weights))
        experts.products.append(pack_matrices(weights, biases, form))
        delattr(experts, name)
    experts.forward = partial(run_experts, experts)
    experts.register_state_dict_post_hook(save_experts)
    experts.register_load_state_dict_pre_hook(load_experts)
    setattr(experts, PACKED, True)


def pack_matrices(
    weights: Tensor, biases: Tensor | Sequence[None], form: int | None = None
) -> nn.ModuleList:
    """Return a packed linear layer for each expert.

    weights: [E, out, in]. biases: [E, out], or E times None. form: as for `pack_experts`.
    """
    layers = nn.ModuleList()
    for weight, bias in zip(weights, biases, strict=True):
        expert_form: Any = form
        if form is None:
            expert_form = kernels.choose_form(weight)
        layers.append(PackedLinear(weight, bias, expert_form))
    return layers
