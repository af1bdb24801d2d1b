"""Weights in eight and four bits: blocks of 32 numbers with one scale, as GGUF stores them.

    form    bytes of a block                                          values
    Q8_0    d (float16) | q q q … q (32 int8)                         d q
    Q4_0    d (float16) | q0 q16  q1 q17  … (16 pairs of 4 bits)      d (q - 8)
    Q4_1    d m (float16) | as Q4_0                                   d q + m

In a pair the first number has the low bits. The kernels round the rows that they multiply to the form of Q8_0
(`eight_bits.c`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from treespec.kernels.checks import KernelInputError, check_dense
from treespec.kernels.huge_pages import allocate_huge_pages
from treespec.kernels.library import load_kernels
from treespec.kernels.ops import (
    BFLOAT16_FLAGS,
    BLOCK_BYTES,
    BLOCK_OUTPUTS,
    CPU_DEVICE,
    Q4_0,
    Q4_1,
    Q8_0,
    PackedWeight,
    round_up,
)
from treespec.kernels.threads import count_threads

BLOCK_NUMBERS = 32
LARGEST_NUMBER = 127  # of Q8_0
LARGEST_FOUR_BITS = 15
MIDDLE_NUMBER = 8  # of Q4_0's numbers, the one of the value 0
# of a scale; smaller scales are 0 in float16 anyway
LARGEST_INVERSE = torch.finfo(torch.float32).max
ROWS_AT_ONCE = 1 << 12  # quantised together: the intermediate results are in float32


def quantize_blocks(weight: Tensor, form: int = Q8_0) -> Tensor:
    """Round a weight [out, in] of floats to blocks [out, in / 32, bytes] uint8, with the bits of llama.cpp.

    Args:
        weight: of any float dtype.
        form: Q8_0, where of each block the number farthest from 0 becomes 127 or -127; Q4_0, where it becomes -8; or
            Q4_1, where the least one becomes 0 and the largest 15.

    Raises: KernelInputError for a weight whose width is no multiple of 32, and for numbers that are not finite or whose
        scale float16 does not hold.
    """
    outputs, inputs = weight.shape
    if inputs % BLOCK_NUMBERS:
        raise KernelInputError(
            f"{inputs} inputs are no multiple of {BLOCK_NUMBERS}, the numbers of a block"
        )
    shape = (outputs, inputs // BLOCK_NUMBERS, BLOCK_BYTES[form])
    blocks = torch.empty(shape, dtype=torch.uint8, device=CPU_DEVICE)
    for first in range(0, outputs, ROWS_AT_ONCE):
        rows = weight.detach()[first : first + ROWS_AT_ONCE].to(CPU_DEVICE, torch.float32)
        halves, numbers = ROUNDING_BY_FORM[form](rows.unflatten(1, (-1, BLOCK_NUMBERS)))
        stored_halves = halves.half()
        if not bool(stored_halves.isfinite().all()):
            raise KernelInputError(
                "blocks hold no numbers that are NaN, nor such as float16 has no scale for"
            )
        part = blocks[first : first + ROWS_AT_ONCE]
        start = 2 * halves.shape[-1]
        part[..., :start] = stored_halves.view(torch.uint8)
        part[..., start:] = numbers
    return blocks


def round_to_eight_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round [..., 32] float32 to Q8_0, halves away from 0. Returns d [..., 1] float32 and bytes [..., 32] uint8."""
    scales = values.abs().amax(-1, keepdim=True) / LARGEST_NUMBER
    scaled = values * invert_scales(scales)
    whole = scaled.trunc()
    numbers = whole + ((scaled - whole) * 2).trunc()
    return scales, numbers.to(torch.int8).view(torch.uint8)


def round_to_four_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round [..., 32] float32 to Q4_0. Returns d [..., 1] float32 and bytes [..., 16] uint8."""
    farthest = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    scales = farthest / -MIDDLE_NUMBER
    return scales, join_four_bits(values * invert_scales(scales) + (MIDDLE_NUMBER + 0.5))


def round_above_least(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round [..., 32] float32 to Q4_1. Returns d and m [..., 2] float32 and bytes [..., 16] uint8."""
    least = values.amin(-1, keepdim=True)
    scales = (values.amax(-1, keepdim=True) - least) / LARGEST_FOUR_BITS
    return torch.cat([scales, least], -1), join_four_bits(
        (values - least) * invert_scales(scales) + 0.5
    )


ROUNDING_BY_FORM: dict[int, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    Q8_0: round_to_eight_bits,
    Q4_0: round_to_four_bits,
    Q4_1: round_above_least,
}


def invert_scales(scales: Tensor) -> Tensor:
    """Return 1 / scales, 0 for 0."""
    inverses = torch.where(scales == 0, scales, 1 / scales)
    return inverses.clamp(-LARGEST_INVERSE, LARGEST_INVERSE)


def join_four_bits(numbers: Tensor) -> Tensor:
    """Cut [..., 32] float32 to whole numbers from 0 to 15, and join them in pairs: [..., 16] uint8."""
    low, high = numbers.clamp(0, LARGEST_FOUR_BITS).to(torch.uint8).chunk(2, -1)
    return low | high << 4


def dequantize_blocks(blocks: Tensor, form: int = Q8_0) -> Tensor:
    """Return [out, in] float32, the values of blocks [out, in / 32, bytes] uint8: exact but for Q4_1, which rounds."""
    scales = blocks[..., :2].contiguous().view(torch.float16).float()
    if form == Q8_0:
        numbers = blocks[..., 2:].contiguous().view(torch.int8).float()
        return (numbers * scales).flatten(1)
    pairs = blocks[..., BLOCK_BYTES[form] - BLOCK_NUMBERS // 2 :]
    numbers = torch.cat([pairs & LARGEST_FOUR_BITS, pairs >> 4], -1).float()
    if form == Q4_0:
        return ((numbers - MIDDLE_NUMBER) * scales).flatten(1)
    least = blocks[..., 2:4].contiguous().view(torch.float16).float()
    return (numbers * scales + least).flatten(1)


def pack_blocks(blocks: Tensor, form: int = Q8_0) -> PackedWeight:
    """Copy blocks [out, in / 32, bytes] uint8 into the order of the kernels, bit by bit."""
    outputs, count, _ = blocks.shape
    inputs = count * BLOCK_NUMBERS
    check_dense(blocks, "blocks", (torch.uint8,), (outputs, count, BLOCK_BYTES[form]))
    numbers = allocate_huge_pages(round_up(outputs, BLOCK_OUTPUTS) * count * BLOCK_BYTES[form])
    load_kernels().pack_eights(blocks.data_ptr(), numbers.data_ptr(), inputs, outputs, form)
    return PackedWeight(numbers, outputs, inputs, form)


def unpack_blocks(weight: PackedWeight) -> Tensor:
    """Return the blocks [out, in / 32, bytes] uint8 of a packed weight."""
    weight.check()
    shape = (weight.outputs, weight.inputs // BLOCK_NUMBERS, BLOCK_BYTES[weight.form])
    blocks = torch.empty(shape, dtype=torch.uint8, device=CPU_DEVICE)
    sizes = (weight.inputs, weight.outputs, weight.form)
    load_kernels().unpack_eights(weight.numbers.data_ptr(), blocks.data_ptr(), *sizes)
    return blocks


def read_outputs(weight: PackedWeight, outputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows [N, in] of a packed weight in blocks, as `dequantize_blocks` does, rounded to a dtype.

    outputs: [N] int64 on the CPU, the numbers of the rows. dtype: of any floats.

    Raises KernelInputError for a weight of floats, and for outputs that it does not have.
    """
    weight.check()
    check_dense(outputs, "outputs", (torch.int64,), (len(outputs),))
    if weight.form not in BLOCK_BYTES:
        raise KernelInputError(f"a packed weight of form {weight.form} has no blocks")
    if len(outputs) and not 0 <= outputs.min() <= outputs.max() < weight.outputs:
        raise KernelInputError(
            f"a packed weight has {weight.outputs} outputs, from {outputs.min()} to {outputs.max()} are read"
        )
    written_dtype = torch.float32
    if dtype in BFLOAT16_FLAGS:
        written_dtype = dtype
    rows = torch.empty(len(outputs), weight.inputs, dtype=written_dtype, device=CPU_DEVICE)
    load_kernels().read_outputs(
        weight.numbers.data_ptr(),
        outputs.data_ptr(),
        rows.data_ptr(),
        len(outputs),
        weight.inputs,
        weight.outputs,
        weight.form,
        BFLOAT16_FLAGS[written_dtype],
        count_threads(),
    )
    return rows.to(dtype)
