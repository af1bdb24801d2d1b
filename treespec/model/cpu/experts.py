"""Experts, routers and activations on a CPU: a row has the same bits in every forward.

torch's rounding of an expert's product depends on its number of rows. torch's activations compute
whole blocks of 64 numbers by one code path, and the remainder of each thread's part by another.
"""

import inspect
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

ACTIVATION_BLOCK = 64  # numbers that torch's activations take at once, in any dtype
# attribute of modules that hold plain matrices next to packed ones
PACKED = "multiplies_by_kernels"
THREAD_GRAIN = 32768  # numbers from which torch uses a further thread


def run_experts(experts: Any, hidden: Tensor, expert_of_row: Tensor, shares: Tensor) -> Tensor:
    """Forward of a mixture's experts (transformers' interface) by packed layers. Returns [N, H].

    Args:
        experts: the module; `pack_experts` has set its `products`.
        hidden: [N, H].
        expert_of_row: [N, K] experts of each token.
        shares: [N, K] their weights.
    """
    # 1. Rows sorted by expert, [N K, H], and both products.
    n, k = expert_of_row.shape
    expert_of_row, order = expert_of_row.flatten().sort(stable=True)
    first, last = experts.products
    counts = expert_of_row.bincount(minlength=len(last)).tolist()
    if experts.has_gate:
        gate = experts._apply_gate
    else:
        gate = experts.act_fn
    inner = gate(multiply_by_expert(first, hidden[order // k], counts))
    rows = multiply_by_expert(last, inner, counts)

    # 2. The sum of each token's experts, in the order of the router.
    rows = rows[order.argsort()].view(n, k, -1).float()
    return (rows * shares[..., None]).sum(1).to(hidden.dtype)


def multiply_by_expert(experts: nn.ModuleList, rows: Tensor, counts: list[int]) -> Tensor:
    """Multiply rows [S, in]: the first counts[0] by expert 0, the next counts[1] by expert 1, … Returns [S, out].

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
    """Inside, a packed layer computes products with a router's weight, and sigmoids take whole blocks."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.shape = (linear.out_features, linear.in_features)

    def __torch_function__(self, code: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if code is F.linear and args[1].shape == self.shape:
            return self.linear(args[0])
        if code in (torch.sigmoid, Tensor.sigmoid):
            return pad_to_blocks(code, args[0])
        if kwargs is None:
            kwargs = {}
        return code(*args, **kwargs)


@final
class RouterForward:
    """The forward of a router that multiplies by a packed layer, as long as its weight is the one that was packed.

    Attributes:
        router: the router.
        product: by the packed layer.
        plain_forward: the router's own.
        version: of the weight: torch counts changes in place.
        address: of the weight.
    """

    def __init__(self, router: Any, linear: nn.Module) -> None:
        self.router = router
        self.product = PackedProduct(linear)
        self.plain_forward = router.forward
        router.weight.data = router.weight.data.clone()  # out of the file that it was read from
        self.version = router.weight._version
        self.address = router.weight.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the router has a weight of its own and its own forward."""
        router = memo[id(self.router)]
        return type(router).forward.__get__(router)

    def __call__(self, *args: Any) -> Any:
        weight = self.router.weight
        if weight.data_ptr() != self.address or weight._version != self.version:
            return self.plain_forward(*args)
        with self.product:
            return self.plain_forward(*args)


def pack_router(router: Any, linear: nn.Module) -> None:
    """Make a router multiply by a packed layer instead of its weight, if a trial gives the same outputs.

    In the trial further arguments, such as a bias on the choice of experts, are zeros.

    router: a module that multiplies by its weight. linear: the packed weight.
    """
    packed = RouterForward(router, linear)
    plain_forward = router.forward
    experts, width = router.weight.shape
    numbers = torch.linspace(-1, 1, 4 * width, dtype=torch.float32, device="cpu")
    x = numbers.view(4, -1).to(router.weight.dtype)
    others = list(inspect.signature(plain_forward).parameters.values())[1:]
    needed = [other for other in others if other.default is other.empty]
    zeros = [x.new_zeros(experts)] * len(needed)

    def run_packed(rows: Tensor) -> Any:
        return packed(rows, *zeros)

    def run_own(rows: Tensor) -> Any:
        return plain_forward(rows, *zeros)

    if matches_outputs(run_packed, run_own, x, 0.05):
        router.forward = packed
        setattr(router, PACKED, True)


def save_experts(experts: Any, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    """Write the weights of packed experts under the names that the model gave them: a hook of `state_dict`."""
    for name, products in zip(experts.packed_names, experts.products, strict=True):
        weights = torch.stack([product.weight for product in products])
        if experts.is_transposed:
            weights = weights.mT.contiguous()
        state[prefix + name] = weights  # biases are parameters of the experts, as before
    for key in [key for key in state if key.startswith(f"{prefix}products.")]:
        del state[key]


def load_experts(experts: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Read what `save_experts` writes: a hook of `load_state_dict`, which then loads each expert."""
    for number, name in enumerate(experts.packed_names):
        weights = state.pop(prefix + name, None)
        biases = state.get(f"{prefix}{name}_bias")
        if weights is not None and experts.is_transposed:
            weights = weights.mT
        for tensors, part in ((weights, "weight"), (biases, "bias")):
            if tensors is None:
                continue
            for expert, tensor in enumerate(tensors):
                state[f"{prefix}products.{number}.{expert}.{part}"] = tensor


def matches_outputs(code: Any, plain: Any, x: Tensor, tolerance: float) -> bool:
    """Whether two functions agree on x within a tolerance; False if either raises.

    Args:
        code: the replacement.
        plain: the model's function.
        x: input of both.
        tolerance: absolute and relative.
    """
    try:
        output = tree_leaves(code(x))[0]
        expected = tree_leaves(plain(x))[0]
        return torch.allclose(output, expected, tolerance, tolerance)
    except Exception:  # a model's own code may raise anything
        return False


def pad_to_blocks(activation: Any, x: Tensor) -> Tensor:
    """Apply an activation to x [...], padded to whole blocks, so that one code path computes all numbers."""
    numbers = x.numel()
    size = round_up_to_blocks(numbers, torch.get_num_threads())
    if size == numbers and not x.shape[-1] % ACTIVATION_BLOCK:
        return activation(x)
    padded = F.pad(x.flatten(), (0, size - numbers))
    return activation(padded)[:numbers].view(x.shape)


def round_up_to_blocks(numbers: int, threads: int) -> int:
    """Return the smallest size, at least `numbers`, that torch divides among its threads in whole blocks.

    14 rows of 4,864 numbers, 68,096, go to three threads: 22,699 each, no whole number of blocks.
    They are padded to 68,352, which is 356 blocks for each thread.
    """
    blocks = max(-(-numbers // ACTIVATION_BLOCK), 1)  # a block of zeros, if there are none
    size = blocks * ACTIVATION_BLOCK
    while size % (ACTIVATION_BLOCK * min(threads, -(-size // THREAD_GRAIN))):
        size += ACTIVATION_BLOCK
    return size
