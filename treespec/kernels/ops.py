"""Products and attention in C: a row has the same bits, whatever other rows a forward holds.

torch's order of summation depends on the number of rows and of keys, so a node of a tree and a forward over one
token round differently. The kernels always sum in the same order, and they read a weight once, at the
speed of the memory. Without the kernels `load_kernels` returns None, and torch's operations run.

Only this room calls the library. Each function checks its tensors (`checks.py`), and allocates with explicit dtype
and device: a process may have other defaults.
"""

import ctypes
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec.kernels.checks import KernelInputError, check_dense
from treespec.kernels.huge_pages import allocate_huge_pages
from treespec.kernels.library import load_kernels
from treespec.kernels.structs import AttentionStruct, LinearStruct
from treespec.kernels.threads import count_threads

# dtypes of rows -> the kernels' `half` argument
BFLOAT16_FLAGS = {torch.bfloat16: 1, torch.float32: 0}
# dtypes of packed weights; kernels.c numbers them in this order
FLOAT_FORMS = (torch.bfloat16, torch.float16, torch.float32)
WEIGHT_FORMS = (*FLOAT_FORMS, torch.uint8, torch.uint8, torch.uint8)
# The forms after those: GGUF's blocks of 32 numbers (`treespec.kernels.eight_bits`), and the bytes of a block.
Q8_0 = 3
Q4_0 = 4
Q4_1 = 5
BLOCK_BYTES = {Q8_0: 34, Q4_0: 18, Q4_1: 20}
# kernels.c pads a packed weight to multiples of these numbers of outputs and inputs.
BLOCK_OUTPUTS = 16
BLOCK_INPUTS = 32

CPU_DEVICE = torch.device("cpu")


class PackedWeight(NamedTuple):
    """A weight [out, in] in the order of the kernels.

    Attributes:
        numbers: [rows * columns], out padded to `BLOCK_OUTPUTS` and in to `BLOCK_INPUTS`; of blocks, their bytes.
        outputs, inputs: out and in.
        form: the index of its dtype in `WEIGHT_FORMS`; `Q8_0`, `Q4_0` or `Q4_1`: of blocks.
    """

    numbers: Tensor
    outputs: int
    inputs: int
    form: int

    def check(self) -> None:
        """Raises KernelInputError if the numbers are not those of such a weight: another dtype, size or device."""
        size = round_up(self.outputs, BLOCK_OUTPUTS) * round_up(self.inputs, BLOCK_INPUTS)
        if self.form in BLOCK_BYTES:
            size = size // BLOCK_INPUTS * BLOCK_BYTES[self.form]
        check_dense(self.numbers, "the packed weight", (WEIGHT_FORMS[self.form],), (size,))


def choose_form(weight: Tensor) -> int | None:
    """Choose the form of a packed weight: the index of the narrowest of `FLOAT_FORMS` that holds its values exactly.

    None for a dtype that the kernels do not take, and for an empty weight.
    """
    if weight.dtype not in FLOAT_FORMS or not weight.numel():
        return None
    for form, dtype in enumerate(FLOAT_FORMS[:2]):
        if torch.equal(weight.to(dtype).to(weight.dtype), weight):
            return form
    return FLOAT_FORMS.index(weight.dtype)


def pack_weight(weight: Tensor, form: int) -> PackedWeight:
    """Copy a weight [out, in] into the order of the kernels. form: from `choose_form`."""
    outputs, inputs = weight.shape
    plain = weight.detach().to(CPU_DEVICE, WEIGHT_FORMS[form]).contiguous()
    rows = round_up(outputs, BLOCK_OUTPUTS)
    columns = round_up(inputs, BLOCK_INPUTS)
    numbers = allocate_huge_pages(rows * columns * plain.itemsize).view(plain.dtype)
    load_kernels().pack(plain.data_ptr(), numbers.data_ptr(), inputs, outputs, form)
    return PackedWeight(numbers, outputs, inputs, form)


def unpack_weight(weight: PackedWeight) -> Tensor:
    """Return a copy [out, in] of a packed weight in the usual order, in the dtype of its form."""
    weight.check()
    numbers = weight.numbers
    plain = torch.empty(weight.outputs, weight.inputs, dtype=numbers.dtype, device=CPU_DEVICE)
    sizes = (weight.inputs, weight.outputs, weight.form)
    load_kernels().unpack(numbers.data_ptr(), plain.data_ptr(), *sizes)
    return plain


def allocate_weight(outputs: int, like: PackedWeight) -> PackedWeight:
    """Return a packed weight of zeros with this number of outputs. like: has the same form and inputs."""
    _, _, inputs, form = like
    numbers_of_output = len(like.numbers) // round_up(like.outputs, BLOCK_OUTPUTS)
    size = round_up(outputs, BLOCK_OUTPUTS) * numbers_of_output
    numbers = torch.zeros(size, dtype=like.numbers.dtype, device=CPU_DEVICE)
    return PackedWeight(numbers, outputs, inputs, form)


def copy_outputs(
    source: PackedWeight, target: PackedWeight, outputs: np.ndarray, places: np.ndarray
) -> None:
    """Copy the outputs [M] of a packed weight to the places [M] of another one of the same form and inputs.

    outputs, places: int64. Raises KernelInputError for weights that differ, and for outputs that they do not have.
    """
    source.check()
    target.check()
    if (source.inputs, source.form) != (target.inputs, target.form) or len(outputs) != len(places):
        raise KernelInputError("outputs are copied between weights of one form, each to one place")
    for weight, numbers in ((source, outputs), (target, places)):
        if numbers.dtype != np.int64 or not numbers.flags.c_contiguous:
            raise KernelInputError(f"outputs are {numbers.dtype}, not contiguous int64")
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < weight.outputs:
            raise KernelInputError(
                f"a packed weight has {weight.outputs} outputs, not {numbers.max()}"
            )
    weights = (source.numbers.data_ptr(), target.numbers.data_ptr())
    moves = (outputs.ctypes.data, places.ctypes.data, len(outputs))
    load_kernels().copy_outputs(
        *weights, *moves, source.inputs, source.outputs, target.outputs, source.form
    )


def round_up(number: int, block: int) -> int:
    """Return the smallest multiple of `block` that is at least `number`."""
    return -(-number // block) * block


def multiply_packed(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Multiply [..., in] by a packed weight. Returns [..., out] in the dtype of x.

    Args:
        x: [..., in] bfloat16 or float32; other dtypes are multiplied in float32.
        weight: packed.
        bias: [out], None: no bias.

    Raises: KernelInputError for an x of another width or device, and a weight or bias that is not of this size.
    """
    if x.dtype not in BFLOAT16_FLAGS:
        return multiply_packed(x.float(), weight, bias).to(x.dtype)
    x = x.contiguous()
    shape = x.shape[:-1]
    check_dense(x, "x", BFLOAT16_FLAGS, (*shape, weight.inputs))
    weight.check()
    bias_pointer = None
    if bias is not None:
        bias = bias.to(x.dtype)
        check_dense(bias, "the bias", BFLOAT16_FLAGS, (weight.outputs,))
        bias_pointer = bias.data_ptr()
    out = x.new_empty(*shape, weight.outputs)
    product = LinearStruct(
        weight.numbers.data_ptr(),
        bias_pointer,
        weight.inputs,
        weight.outputs,
        weight.form,
        BFLOAT16_FLAGS[x.dtype],
        count_threads(),
    )
    rows = x.numel() // weight.inputs
    load_kernels().linear(ctypes.byref(product), x.data_ptr(), out.data_ptr(), rows)
    return out


def fill_noise(starts: Sequence[int], size: int, tokens: Tensor | None = None) -> Tensor:
    """Return [P, N] float32 Gumbel noise of P SplitMix64 streams, as `treespec.sampling.noise`.

    starts: P int64 states. size: V. tokens: [N] int64 below V, contiguous on a CPU; None: all V, in order.
    """
    states = torch.tensor(starts, dtype=torch.int64, device=CPU_DEVICE)
    tokens_pointer = None
    if tokens is not None:
        size = len(tokens)
        check_dense(tokens, "tokens", (torch.int64,), (size,))
        tokens_pointer = tokens.data_ptr()
    noise = torch.empty(len(starts), size, dtype=torch.float32, device=CPU_DEVICE)
    load_kernels().noise(
        states.data_ptr(), tokens_pointer, noise.data_ptr(), len(starts), size, count_threads()
    )
    return noise


def rank_tokens(logits: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return [N, k] float32 probabilities of the k most likely tokens, descending, and [N, k] int64 these tokens.

    Of equal ones the earlier token comes first.

    logits: [N, V] bfloat16 or float32, contiguous on a CPU, with k <= V. temperature: above 0.
    """
    count, size = logits.shape
    check_dense(logits, "logits", BFLOAT16_FLAGS, (count, size))
    if not 0 < k <= size:
        raise KernelInputError(f"k is {k}, must be from 1 to the {size} tokens of a row")
    probs = torch.empty(count, k, dtype=torch.float32, device=CPU_DEVICE)
    tokens = torch.empty(count, k, dtype=torch.int64, device=CPU_DEVICE)
    pointers = (logits.data_ptr(), probs.data_ptr(), tokens.data_ptr())
    half = BFLOAT16_FLAGS[logits.dtype]
    threads = count_threads()
    load_kernels().rank(*pointers, count, size, k, 1 / temperature, half, threads)
    return probs, tokens


def choose_token(logits: Tensor, start: int | None, temperature: float) -> int:
    """Return the token with the largest score, logit / temperature + noise: of equal ones the first; V if one is NaN.

    logits: [V] bfloat16 or float32, contiguous on a CPU. start: the int64 state of the noise, as in `fill_noise`;
    None: none. temperature: above 0.
    """
    check_dense(logits, "logits", BFLOAT16_FLAGS, (len(logits),))
    state_pointer = None
    if start is not None:
        state_pointer = ctypes.byref(ctypes.c_int64(start))
    half = BFLOAT16_FLAGS[logits.dtype]
    token: int = load_kernels().choose(
        logits.data_ptr(), state_pointer, len(logits), temperature, half, count_threads()
    )
    return token


def score_tokens(logits: Tensor, noise: Tensor, factor: float, temperature: float) -> Tensor:
    """Return [F, N] float32 scores: logit * factor, rounded to the dtype of logits, / temperature, plus noise.

    logits: [F, N] bfloat16 or float32. noise: [N] float32. Both are contiguous on a CPU. temperature: above 0.
    """
    rows, size = logits.shape
    check_dense(logits, "logits", BFLOAT16_FLAGS, (rows, size))
    check_dense(noise, "noise", (torch.float32,), (size,))
    scores = torch.empty(rows, size, dtype=torch.float32, device=CPU_DEVICE)
    pointers = (logits.data_ptr(), noise.data_ptr(), scores.data_ptr())
    half = BFLOAT16_FLAGS[logits.dtype]
    load_kernels().score(*pointers, rows, size, factor, temperature, half)
    return scores


def copy_columns(blocks: Sequence[Tensor], moves: Sequence[Sequence[int]]) -> None:
    """Copy columns of blocks [B, KV heads, capacity, D], which have one shape and dtype, contiguous rows on a CPU.

    moves: batch row, column to read and column to write of each copy; they run in order.
    """
    shape = blocks[0].shape
    rows, heads, capacity, width = shape
    dtypes = (blocks[0].dtype,)
    for block in blocks:
        check_dense(block, "a block", dtypes, shape)
    for row, source, place in moves:
        if not (0 <= row < rows and 0 <= source < capacity and 0 <= place < capacity):
            raise KernelInputError(
                f"a move of row {row} from column {source} to {place} leaves {tuple(shape)}"
            )
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
        count_threads(),
    )


def apply_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return [..., H] the root mean square norm of x [..., H], as in Llama: rounded, then times the weight."""
    x = x.contiguous()
    width = len(weight)
    check_dense(x, "x", BFLOAT16_FLAGS, (*x.shape[:-1], width))
    check_dense(weight, "the weight", (x.dtype,), (width,))
    rows = x.numel() // width
    out = torch.empty_like(x)
    pointers = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
    half = BFLOAT16_FLAGS[x.dtype]
    threads = count_threads()
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

    # 2. The fields.
    batch, heads, nodes, width = query.shape
    _, kv_heads, columns, value_width = value.shape
    out = query.new_empty(batch, nodes, heads, value_width)
    fields = AttentionStruct(
        query=query.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        mask=mask.data_ptr(),
        out=out.data_ptr(),
        texts=batch,
        heads=heads,
        kv_heads=kv_heads,
        nodes=nodes,
        columns=columns,
        free_columns=columns - mask.shape[-1],
        width=width,
        value_width=value_width,
        mask_text=find_stride(mask, 0),
        mask_node=mask.stride(2),
        scale=scale,
        cap=cap,
        half=BFLOAT16_FLAGS[query.dtype],
        threads=count_threads(),
    )
    fields.query_text, fields.query_head, fields.query_node = query.stride()[:3]
    fields.key_text, fields.key_head, fields.key_column = key.stride()[:3]
    fields.value_text, fields.value_head, fields.value_column = value.stride()[:3]
    if sinks is not None:
        sinks = sinks.to(query.dtype)
        check_dense(sinks, "sinks", BFLOAT16_FLAGS, (heads,))
        fields.sinks = sinks.data_ptr()

    # 3. The call.
    load_kernels().attention(ctypes.byref(fields))
    return out


def can_attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Whether the attention kernel takes the tensors of `attend_packed`: it broadcasts only one mask over all texts."""
    dtype = query.dtype
    if dtype not in BFLOAT16_FLAGS or mask.shape[-1] > value.shape[2]:
        return False
    batch, heads, nodes, width = query.shape
    _, kv_heads, columns, _ = value.shape
    if key.shape != (batch, kv_heads, columns, width) or len(value) != batch or heads % kv_heads:
        return False
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
