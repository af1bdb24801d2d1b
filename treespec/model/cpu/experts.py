"""Experts, routers and activations on a CPU: a row has the same bits in every forward.

torch's products of experts depend on how many rows an expert has. Its activations have one form for
whole blocks of 64 numbers and another for the rest of each thread's part.
"""

import inspect
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

ACTIVATION_BLOCK = 64  # numbers that torch's activations take at once, in any dtype
PACKED = "multiplies_by_kernels"  # attribute of modules that keep matrices beside packed ones
THREAD_GRAIN = 32768  # numbers from which torch uses a further thread


def run_experts(own: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """[N, H] the forward of experts, of transformers' interface, whose products are packed layers.

    hidden: [N, H]. chosen: [N, K] experts of each token. shares: [N, K].
    """
    # 1. Rows in the order of their experts, [N K, H], and both products.
    n, k = chosen.shape
    chosen, order = chosen.flatten().sort(stable=True)
    first, last = own.products
    counts = chosen.bincount(minlength=len(last)).tolist()
    if own.has_gate:
        gate = own._apply_gate
    else:
        gate = own.act_fn
    inner = gate(multiply_by_expert(first, hidden[order // k], counts))
    rows = multiply_by_expert(last, inner, counts)

    # 2. The sum of each token's experts, in the order of its choice.
    rows = rows[order.argsort()].view(n, k, -1).float()
    return (rows * shares[..., None]).sum(1).to(hidden.dtype)


def multiply_by_expert(experts: nn.ModuleList, rows: Tensor, counts: list[int]) -> Tensor:
    """[S, out] from rows [S, in]: the first counts[0] go to expert 0, the next counts[1] to expert 1, …

    Five rows and counts 2 0 3:

        rows       0 1 | 2 3 4
        experts     0  |   2
    """
    outputs = []
    for expert, part in zip(experts, rows.split(counts), strict=True):
        if len(part):
            outputs.append(expert(part))
    return torch.cat(outputs)


@final
class PackedProduct(TorchFunctionMode):
    """Inside, products with a router's weight are those of a packed layer; sigmoids take blocks."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def __torch_function__(self, code: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if code is F.linear and args[1].shape == self.linear.weight.shape:
            return self.linear(args[0])
        if code in (torch.sigmoid, Tensor.sigmoid):
            return pad_to_blocks(code, args[0])
        if kwargs is None:
            kwargs = {}
        return code(*args, **kwargs)


def pack_router(router: Any, linear: nn.Module) -> None:
    """Let a module that multiplies by its own weight use a packed layer of it, if a trial agrees.

    In the trial further arguments, such as a bias on the choice of experts, are zero for each.
    """
    product = PackedProduct(linear)
    own = router.forward

    def packed(*args: Any) -> Any:
        with product:
            return own(*args)

    experts, width = router.weight.shape
    x = torch.linspace(-1, 1, 4 * width).view(4, -1).to(router.weight.dtype)
    others = list(inspect.signature(own).parameters.values())[1:]
    needed = [other for other in others if other.default is other.empty]
    zeros = [x.new_zeros(experts)] * len(needed)

    def run_packed(rows: Tensor) -> Any:
        return packed(rows, *zeros)

    def run_own(rows: Tensor) -> Any:
        return own(rows, *zeros)

    if matches_outputs(run_packed, run_own, x, 0.05):
        router.forward = packed
        setattr(router, PACKED, True)


def matches_outputs(code: Any, own: Any, x: Tensor, error: float) -> bool:
    """Whether code computes what a model's own computes from x; False where either raises."""
    try:
        output = tree_leaves(code(x))[0]
        expected = tree_leaves(own(x))[0]
        return torch.allclose(output, expected, error, error)
    except Exception:  # a model's own code may raise anything
        return False


def pad_to_blocks(activation: Any, x: Tensor) -> Tensor:
    """[...] an activation of x [...] that takes all numbers in whole blocks: each has the same form."""
    numbers = x.numel()
    size = round_up_to_blocks(numbers, torch.get_num_threads())
    if size == numbers and not x.shape[-1] % ACTIVATION_BLOCK:
        return activation(x)
    padded = F.pad(x.flatten(), (0, size - numbers))
    return activation(padded)[:numbers].view(x.shape)


def round_up_to_blocks(numbers: int, threads: int) -> int:
    """The next larger number of numbers that torch gives to its threads in whole blocks.

    14 rows of 4,864 numbers, 68,096, go to three threads: 22,699 each, no whole number of blocks.
    They are padded to 68,352, which is 356 blocks for each thread.
    """
    size = (
        max(-(-numbers // ACTIVATION_BLOCK), 1) * ACTIVATION_BLOCK
    )  # a block of zeros, if there are none
    while size % (ACTIVATION_BLOCK * min(threads, -(-size // THREAD_GRAIN))):
        size += ACTIVATION_BLOCK
    return size
