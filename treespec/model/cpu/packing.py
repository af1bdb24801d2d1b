"""Weights in the order in which a CPU multiplies them, in 16 bits if those hold the values exactly.

weight                              layer             kept as
with a C compiler, values of
    bfloat16 or half precision      `PackedLinear`    16 bits
    single precision                `PackedLinear`    32 bits
any other                           unchanged         unchanged

Each expert of a mixture is a `PackedLinear` too, and a router keeps its plain weight next to a packed one.
"""

import inspect
from collections import defaultdict
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

JOINED_PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
)  # they read the same input
OWN_USE = ("dt_proj",)  # Mamba reads this layer's weight without calling the layer


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
    constants = [value for value in vars(norm).values() if type(value) is float]
    takes_one = len(inspect.signature(norm.forward).parameters) == 1  # some take a gate too
    if (
        weight.dtype not in kernels.BFLOAT16_FLAGS
        or weight.dim() != 1
        or len(constants) != 1
        or not takes_one
    ):
        return norm
    packed = PackedNorm(weight, constants[0])
    random = torch.Generator().manual_seed(0)
    x = torch.randn(16, len(weight), generator=random) * torch.logspace(-3, 3, 16)[:, None]
    rounding = max(2 * torch.finfo(weight.dtype).eps, 1e-6)
    return packed if matches_outputs(packed, norm, x.to(weight), rounding) else norm


@torch.no_grad()
def pack(model: nn.Module) -> None:
    """Replace the linear layers, experts and norms of a model that can be packed.

    Layers are packed one at a time: the plain weight is freed before the next is packed, unless an
    embedding shares it. A layer under two names is packed once. In a model without weights on the CPU only norms
    are replaced, and linear layers that read the same input become one product.
    """
    on_cpu = any(weight.is_cpu for weight in model.parameters())
    places: defaultdict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        if name and not name.endswith(OWN_USE):
            places[module].append(name)
    del module  # else its weight would stay in memory
    while places:
        layer, names = places.popitem()
        packed = pack_layer(layer, on_cpu)
        for name in names if packed is not layer else ():
            model.set_submodule(name, packed)
    for module in () if on_cpu else model.modules():
        for group in JOINED_PROJECTIONS:
            join([getattr(module, name, None) for name in group])


def join(layers: Sequence[Any]) -> None:
    """Merge linear layers that share an input (q/k/v, gate/up) into one matmul, computed when the first is called."""
    are_plain = (
        type(x) is nn.Linear and is_plain_weight(x.weight) and has_own_code(x) for x in layers
    )
    if not all(are_plain) or len({(x.in_features, x.weight.device) for x in layers}) > 1:
        return
    sizes = [layer.out_features for layer in layers]
    weight = torch.cat([layer.weight for layer in layers])
    pending: dict[
        int, tuple[Tensor, Tensor]
    ] = {}  # of each layer: the input, and its part of the product

    def part(number: int, bias: Tensor | None, x: Tensor) -> Tensor:
        if number not in pending or pending[number][0] is not x:
            pending.update(
                enumerate((x, y) for y in nn.functional.linear(x, weight).split(sizes, -1))
            )
        out = pending.pop(number)[1]
        return out if bias is None else out + bias

    for i, (layer, weight_part) in enumerate(zip(layers, weight.split(sizes), strict=True)):
        layer.weight = nn.Parameter(weight_part, requires_grad=False)
        layer.forward = partial(part, i, layer.bias)


def has_own_code(layer: Any) -> bool:
    """Whether a layer runs only the code of its class: accelerate and others add hooks."""
    hooks = layer._forward_pre_hooks or layer._forward_hooks or hasattr(layer, "_hf_hook")
    return not hooks and "forward" not in vars(layer)


@torch.no_grad()
def pack_layer(layer: Any, on_cpu: bool = True) -> nn.Module:
    """Return a packed layer with the values of a plain one, or the layer itself if it cannot be packed.

    Subclasses, replaced forwards and hooks may do more than multiply: compressed-tensors rounds
    inputs there, accelerate moves the weight, torchao puts its tensor classes into plain modules.
    """
    # 1. Layers that stay, and norms.
    if not has_own_code(layer) or (on_cpu and not kernels.load_kernels()):
        return layer
    weight = layer._parameters.get("weight")
    if "RMSNorm" in type(layer).__name__ and is_plain_weight(weight):
        return pack_norm(layer)
    if not on_cpu:
        return layer

    # 2. Activations, and experts.
    if type(layer).__module__ == "transformers.activations":
        layer.forward = partial(pad_to_blocks, layer.forward)
    is_experts = vars(layer).get("has_post_expert_norm") is False  # of transformers' interface
    if is_experts and is_plain_weight(layer.down_proj) and layer.down_proj.is_cpu:
        pack_experts(layer)

    # 3. Linear layers; another module with a matrix may be a router.
    if not is_plain_weight(weight) or not weight.is_cpu or isinstance(layer, nn.Embedding):
        return layer
    if weight.dim() != 2:
        return layer
    weight = weight.T if isinstance(layer, Conv1D) else weight
    form = kernels.choose_form(weight)
    if form is not None:
        packed = PackedLinear(weight, layer._parameters.get("bias"), form)
        if type(layer) in (nn.Linear, Conv1D):
            return packed
        if not isinstance(
            layer, nn.Linear
        ):  # a subclass's weight may be read without a call of its forward
            pack_router(layer, packed)
    return layer


def pack_experts(experts: Any) -> None:
    """Pack the products of experts, and free their plain weights."""
    experts.products = nn.ModuleList()
    for name in ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj"):
        weights = getattr(experts, name)
        biases = getattr(experts, f"{name}_bias", [None] * len(weights))
        weights = weights.mT if experts.is_transposed else weights
        forms: Any = map(kernels.choose_form, weights)
        experts.products.append(nn.ModuleList(map(PackedLinear, weights, biases, forms)))
        delattr(experts, name)
    experts.forward = partial(run_experts, experts)
    setattr(experts, PACKED, True)


def has_bfloat16_instructions() -> bool:
    """Whether this CPU has instructions for bfloat16 that oneDNN uses."""
    has_onednn = torch.backends.mkldnn.is_available()
    return has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
