"""Mixtures of experts, routers and activations on a CPU: a row has the same bits in every forward.

torch's own products of experts depend on how many rows go to an expert, and its activations have one
form for whole blocks of 64 numbers and another for the rest of a thread's part.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from treespec.model import kernels
from treespec.model.quantised import is_plain_weight

BLOCK = 64  # numbers that torch's activations take at once, in any dtype
GRAINS = 2048, 32768  # numbers from which torch uses a further thread, by operation


@final
class PackedExperts(nn.Module):
    """Experts of transformers' experts interface, each a packed product. `own` gives their gate."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own, self.first = own, "gate_up_proj" if own.has_gate else "up_proj"
        self.forms: dict[
            str, tuple[tuple[int, int], int]
        ] = {}  # (out, in) and form of each product
        for name in (self.first, "down_proj"):
            weights = getattr(own, name).mT if own.is_transposed else getattr(own, name)
            form = max(kernels.form_of(weight) or 0 for weight in weights)
            packed = torch.stack([kernels.packed(weight, form) for weight in weights])
            self.forms[name] = (weights.shape[1], weights.shape[2]), form
            setattr(own, name, nn.Parameter(packed, requires_grad=False))

    def forward(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """[N, H] from hidden states [N, H], chosen experts [N, K] and their shares [N, K]."""
        # 1. Rows in the order of their experts, [N K, H].
        n, k = chosen.shape
        chosen, order = chosen.flatten().sort(stable=True)
        counts = chosen.bincount(minlength=len(self.own.down_proj)).tolist()

        # 2. Both products, and what is between and after them.
        rows = self._product(self.first, hidden[order // k], counts)
        rows = self.own._apply_gate(rows) if self.own.has_gate else self.own.act_fn(rows)
        rows = self._product("down_proj", rows, counts)
        if self.own.has_post_expert_norm:
            rows = self.own.post_expert_norm(rows)

        # 3. The sum of each token's experts, in the order of its choice.
        weighted = torch.empty_like(rows, dtype=torch.float32)
        weighted[order] = rows.float() * shares.flatten()[order, None]
        return weighted.view(n, k, -1).sum(1).to(hidden.dtype)

    def _product(self, name: str, rows: Tensor, counts: list[int]) -> Tensor:
        """[S, out] from rows [S, in], of which the first counts[0] are of expert 0, and so on."""
        packed, biases = getattr(self.own, name), getattr(self.own, f"{name}_bias", None)
        parts = [
            kernels.linear(
                part, packed[e], None if biases is None else biases[e], *self.forms[name]
            )
            for e, part in enumerate(rows.split(counts))
            if len(part)
        ]
        return torch.cat(parts)


def packed_experts(experts: Any) -> nn.Module:
    """The experts with packed products, or themselves where they are of another kind."""
    weights = [vars(experts)["_parameters"].get(name) for name in ("gate_up_proj", "up_proj")]
    weights = [*filter(None.__ne__, weights), experts._parameters.get("down_proj")]
    plain = all(
        is_plain_weight(weight) and weight.is_cpu and weight.dim() == 3 for weight in weights
    )
    if not plain or "has_post_expert_norm" not in vars(experts):
        return experts
    return PackedExperts(experts)


@final
class PackedProduct(TorchFunctionMode):
    """A router's own forward, in which products with its weight [out, in] are those with a packed one."""

    def __init__(self, router: Any, form: int) -> None:
        super().__init__()
        self.own, self.shape, self.form = router.forward, tuple(router.weight.shape), form
        self.packed = kernels.packed(router.weight, form)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self:
            return self.own(*args, **kwargs)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.linear and args[1].shape == self.shape:
            bias = kwargs.get("bias") if len(args) < 3 else args[2]
            return kernels.linear(args[0], self.packed, bias, self.shape, self.form)
        return function(*args, **kwargs)


def pack_router(router: Any) -> None:
    """Let a module that multiplies by a matrix of its own use a packed one, if a trial agrees."""
    weight, form = router.weight, kernels.form_of(router.weight)
    if form is None:
        return
    product = PackedProduct(router, form)
    x = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    try:
        expected, found = (tree_leaves(code(x))[0] for code in (product.own, product))
    except Exception:  # a model's own code may raise anything
        return
    if torch.allclose(found.float(), expected.float(), rtol=0.05, atol=0.05):
        router.forward = product


def all_packed(modules: Iterable[nn.Module]) -> bool:
    """Whether no module multiplies by torch's linear layers."""
    linear = (module for module in modules if isinstance(module, nn.Linear | Conv1D))
    return all(isinstance(vars(module).get("forward"), PackedProduct) for module in linear)


@final
class Blocked(nn.Module):
    """An activation that takes all numbers in whole blocks, so that each has the same form."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        """[...] -> [...]"""
        numbers = x.numel()
        size = blocked(numbers, torch.get_num_threads())
        if size == numbers and not x.shape[-1] % BLOCK:
            return self.own(x)
        padded = x.new_zeros(size)
        padded[:numbers] = x.flatten()
        return self.own(padded)[:numbers].view(x.shape)


@cache
def blocked(numbers: int, threads: int) -> int:
    """The next larger number of numbers that torch gives to its threads in whole blocks.

    128 rows of 1,080 numbers for three threads: 1,080 * 128 / 3 = 46,080 = 720 blocks each.
    """
    size = -(-numbers // BLOCK) * BLOCK
    while any(size % (BLOCK * min(threads, -(-size // grain))) for grain in GRAINS):
        size += BLOCK
    return size


def blocked_activation(module: nn.Module) -> nn.Module:
    """A module that computes number by number as `Blocked`, another as it is: found by trial."""
    x = torch.linspace(-3, 3, 256).view(4, 64)
    try:
        whole, part = module(x), module(x[:, :7])
    except Exception:  # a model's own code may raise anything
        return module
    alike = isinstance(whole, Tensor) and whole.shape == x.shape and not torch.equal(whole, x)
    return Blocked(module) if alike and torch.allclose(whole[:, :7], part) else module
