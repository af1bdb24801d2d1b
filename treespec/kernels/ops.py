"""Products and attention in C: a row has the same bits, whatever other rows a forward holds.

torch's order of summation depends on the number of rows and of keys, so a node of a tree and a forward over one
token round differently. The kernels always sum in the same order, and they read a weight once, at the
speed of the memory. Without the kernels `load_kernels` returns None, and torch's operations run.
"""

from collections.abc import Sequence
from struct import Struct

import torch
from torch import Tensor

from treespec.kernels.huge_pages import allocate_huge_pages
from treespec.kernels.library import load_kernels

# dtypes of rows -> the kernels' `half` argument
BFLOAT16_FLAGS = {torch.bfloat16: 1, torch.float32: 0}
# dtypes of packed weights; kernels.c numbers them in this order
WEIGHT_FORMS = (torch.bfloat16, torch.float16, torch.float32)
# kernels.c pads a packed weight to multiples of these numbers of outputs and inputs.
BLOCK_OUTPUTS = 16
BLOCK_INPUTS = 32

# `Linear` of kernels.c: pointers, sizes, modes
LINEAR_STRUCT = Struct("2P2l3i")
# `Attention` of kernels.c: pointers, sizes and strides, numbers, modes
ATTENTION_STRUCT = Struct("7P19l2f2i")


def choose_form(weight: Tensor) -> int | None:
    """Choose the form of a packed weight: the index of the narrowest of `WEIGHT_FORMS` that holds its values exactly.

    None for a dtype that the kernels do not take, and for an empty weight.
    """
    if weight.dtype not in WEIGHT_FORMS or not weight.numel():
        return None
    for form, dtype in enumerate(WEIGHT_FORMS[:2]):
        if torch.equal(weight.to(dtype).to(weight.dtype), weight):
            return form
    return WEIGHT_FORMS.index(weight.dtype)


def pack_weight(weight: Tensor, form: int) -> Tensor:
    """Copy a weight [out, in] into the order of the kernels. form: from `choose_form`."""
    outputs, inputs = weight.shape
    plain = weight.detach().to(WEIGHT_FORMS[form]).contiguous()
    rows = round_up(outputs, BLOCK_OUTPUTS)
    columns = round_up(inputs, BLOCK_INPUTS)
    packed = allocate_huge_pages(rows * columns * plain.itemsize).view(plain.dtype)
    load_kernels().pack(plain.data_ptr(), packed.data_ptr(), inputs, outputs, form)
    return packed


def round_up(number: int, block: int) -> int:
    """Return the smallest multiple of `block` that is at least `number`."""
    return -(-number // block) * block


def multiply_packed(
    x: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, int], form: int
) -> Tensor:
    """Multiply [..., in] by a packed weight. Returns [..., out] in the dtype of x.

    Args:
        x: [..., in] bfloat16 or float32; other dtypes are multiplied in float32.
        weight: packed.
        bias: [out], None: no bias.
        shape: (out, in) of the weight.
        form: of the packed weight.
    """
    if x.dtype not in BFLOAT16_FLAGS:
        return multiply_packed(x.float(), weight, bias, shape, form).to(x.dtype)
    outputs, inputs = shape
    x = x.contiguous()
    bias_pointer = 0
    if bias is not None:
        bias = bias.to(x.dtype)
        bias_pointer = bias.data_ptr()
    out = x.new_empty(*x.shape[:-1], outputs)
    half = BFLOAT16_FLAGS[x.dtype]
    threads = torch.get_num_threads()
    pointers = (weight.data_ptr(), bias_pointer)
    options = LINEAR_STRUCT.pack(*pointers, inputs, outputs, form, half, threads)
    load_kernels().linear(options, x.data_ptr(), out.data_ptr(), x.numel() // inputs)
    return out


def fill_noise(starts: Sequence[int], size: int) -> Tensor:
    """Return [P, size] float32 Gumbel noise of P SplitMix64 streams, as `treespec.sampling.noise`.

    starts: P int64 states. size: numbers of each stream.
    """
    states = torch.tensor(starts)
    noise = torch.empty(len(starts), size)
    threads = torch.get_num_threads()
    load_kernels().noise(states.data_ptr(), noise.data_ptr(), len(starts), size, threads)
    return noise


def rank_tokens(logits: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return [N, k] float32 probabilities of the k most likely tokens, descending, and [N, k] int64 these tokens.

    Of equal ones the earlier token comes first.

    logits: [N, V] bfloat16 or float32, contiguous on a CPU, with k <= V. temperature: above 0.
    """
    count, size = logits.shape
    probs = torch.empty(count, k)
    tokens = torch.empty(count, k, dtype=torch.int64)
    pointers = (logits.data_ptr(), probs.data_ptr(), tokens.data_ptr())
    half = BFLOAT16_FLAGS[logits.dtype]
    threads = torch.get_num_threads()
    load_kernels().rank(*pointers, count, size, k, 1 / temperature, half, threads)
    return probs, tokens


def choose_token(logits: Tensor, noise: Tensor | None, temperature: float) -> int:
    """Return the token with the largest score, logit / temperature + noise: of equal ones the first; V if one is NaN.

    logits: [V] bfloat16 or float32, contiguous on a CPU. noise: [V] float32, contiguous on a CPU; None: none.
    temperature: above 0.
    """
    noise_pointer = 0
    if noise is not None:
        noise_pointer = noise.data_ptr()
    half = BFLOAT16_FLAGS[logits.dtype]
    token: int = load_kernels().choose(
        logits.data_ptr(), noise_pointer, len(logits), temperature, half
    )
    return token


def score_tokens(
    logits: Tensor, noise: Tensor, tokens: Tensor | None, factor: float, temperature: float
) -> Tensor:
    """Return [F, N] float32 scores: logit * factor, rounded to the dtype of logits, / temperature, plus noise.

    logits: [F, N] bfloat16 or float32. noise: [V] float32. tokens: [N] int64, the token of each column; None: they
    are all V. All are contiguous on a CPU. temperature: above 0.
    """
    rows, size = logits.shape
    scores = torch.empty(rows, size)
    tokens_pointer = 0
    if tokens is not None:
        tokens_pointer = tokens.data_ptr()
    pointers = (logits.data_ptr(), noise.data_ptr(), tokens_pointer, scores.data_ptr())
    half = BFLOAT16_FLAGS[logits.dtype]
    load_kernels().score(*pointers, rows, size, factor, temperature, half)
    return scores


def copy_columns(blocks: Sequence[Tensor], moves: Sequence[Sequence[int]]) -> None:
    """Copy columns of blocks [B, KV heads, capacity, D], which have one shape and dtype, contiguous rows on a CPU.

    moves: batch row, column to read and column to write of each copy; they run in order.
    """
    _, heads, capacity, width = blocks[0].shape
    addresses = [block.data_ptr() for block in blocks]
    numbers = [number for move in moves for number in move]
    load_kernels().copy_columns(
        Struct(f"{len(addresses)}P").pack(*addresses),
        Struct(f"{len(numbers)}q").pack(*numbers),
        len(addresses),
        len(moves),
        heads,
        capacity,
        width * blocks[0].element_size(),
        torch.get_num_threads(),
    )


def apply_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return [..., H] the root mean square norm of x [..., H], as in Llama: rounded, then times the weight."""
    x = x.contiguous()
    width = len(weight)
    rows = x.numel() // width
    out = torch.empty_like(x)
    pointers = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
    half = BFLOAT16_FLAGS[x.dtype]
    threads = torch.get_num_threads()
    load_kernels().rms_norm(*pointers, rows, width, eps, half, threads)
    return out


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor | None:
    """Attend over N nodes. Returns [B, N, heads, DV], or None if the kernels do not take these tensors.

    Args:
        query: [B, heads, N, D].
        key: [B, KV heads, T, D].
        value: [B, KV heads, T, DV].
        mask: [B or 1, 1, N, T or fewer] additive, of the last columns; all nodes see the earlier columns. Every
            node must see at least one column.
        scale: factor on the scores.
        cap: soft cap of the scores (Gemma 2). Default: 0, none.
        sinks: [heads] scores that enter only the sum of the softmax (gpt-oss). Default: none.
    """
    # 1. Half precision is computed in single precision; what the kernel does not read is left to the caller.
    if query.dtype == mask.dtype == torch.float16:
        output = attend_packed(
            query.float(), key.float(), value.float(), mask.float(), scale, cap, sinks
        )
        if output is not None:
            output = output.half()
        return output
    if not can_attend(query, key, value, mask):
        return None

    # 2. Tensors, as pointers and strides.
    batch, heads, nodes, width = query.shape
    _, kv_heads, columns, value_width = value.shape
    out = query.new_empty(batch, nodes, heads, value_width)
    sinks_pointer = 0
    if sinks is not None:
        sinks = sinks.to(query.dtype)
        sinks_pointer = sinks.data_ptr()
    pointers = [query.data_ptr(), key.data_ptr(), value.data_ptr(), mask.data_ptr()]
    starts_pointer = 0  # all nodes have rows
    pointers += [out.data_ptr(), sinks_pointer, starts_pointer]
    strides = [*query.stride()[:3], *key.stride()[:3], *value.stride()[:3]]
    strides += [find_stride(mask, 0), mask.stride(2)]

    # 3. The call.
    free_columns = columns - mask.shape[-1]
    sizes = [batch, heads, kv_heads, nodes, columns, free_columns, width, value_width]
    half = BFLOAT16_FLAGS[query.dtype]
    threads = torch.get_num_threads()
    options = ATTENTION_STRUCT.pack(*pointers, *sizes, *strides, scale, cap, half, threads)
    load_kernels().attention(options)
    return out


def can_attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Whether the attention kernel takes the tensors of `attend_packed`: it broadcasts only one mask over all texts."""
    dtype = query.dtype
    if dtype not in BFLOAT16_FLAGS or mask.shape[-1] > value.shape[2]:
        return False
    batch, _, nodes, _ = query.shape
    if mask.shape[:3] not in ((batch, 1, nodes), (1, 1, nodes)):
        return False
    for tensor in (query, key, value, mask):
        if not is_readable(tensor, dtype):
            return False
    return load_kernels() is not None


def is_readable(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the attention kernel can read a tensor without a copy: device, dtype, stride and gradient fit."""
    if not tensor.is_cpu or tensor.dtype != dtype:
        return False
    return tensor.stride(-1) == 1 and not tensor.requires_grad


def find_stride(tensor: Tensor, dimension: int) -> int:
    """Return the stride of a dimension, as the kernels take it: 0 where a size of 1 is broadcast."""
    if tensor.shape[dimension] > 1:
        return tensor.stride(dimension)
    return 0
