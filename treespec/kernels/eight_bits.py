"""Weights in eight bits: blocks of 32 numbers with one scale, as GGUF's Q8_0 stores them.

A block has 34 bytes, and its values are q d:

    d (float16) | q q q … q (32 int8)

The kernels round the rows that they multiply to the same form (`eight_bits.c`).
"""

import torch
from torch import Tensor

from treespec.kernels.checks import KernelInputError, check_dense
from treespec.kernels.huge_pages import allocate_huge_pages
from treespec.kernels.library import load_kernels
from treespec.kernels.ops import BLOCK_OUTPUTS, CPU_DEVICE, EIGHT_BITS, PackedWeight, round_up

BLOCK_NUMBERS = 32
BLOCK_BYTES = 34  # the scale has the first two
LARGEST_NUMBER = 127
# of a scale; smaller scales are 0 in float16 anyway
LARGEST_INVERSE = torch.finfo(torch.float32).max
ROWS_AT_ONCE = 1 << 12  # quantised together: the intermediate results are in float32


def quantize_blocks(weight: Tensor) -> Tensor:
    """Round a weight [out, in] of floats to blocks [out, in / 32, 34] uint8, with the bits of llama.cpp's Q8_0.

    Of each block the number farthest from 0 becomes 127 or -127; halves are rounded away from 0.

    Raises: KernelInputError for a weight whose width is no multiple of 32, and for numbers that are not finite or whose
        scale float16 does not hold.
    """
    outputs, inputs = weight.shape
    if inputs % BLOCK_NUMBERS:
        raise KernelInputError(
            f"{inputs} inputs are no multiple of {BLOCK_NUMBERS}, the numbers of a block of eight bits"
        )
    blocks = torch.empty(
        outputs, inputs // BLOCK_NUMBERS, BLOCK_BYTES, dtype=torch.uint8, device=CPU_DEVICE
    )
    for first in range(0, outputs, ROWS_AT_ONCE):
        rows = weight.detach()[first : first + ROWS_AT_ONCE].to(CPU_DEVICE, torch.float32)
        values = rows.unflatten(1, (-1, BLOCK_NUMBERS))
        scales = values.abs().amax(-1, keepdim=True) / LARGEST_NUMBER
        stored_scales = scales.half()
        if not bool(stored_scales.isfinite().all()):
            raise KernelInputError("eight bits hold no numbers that are NaN, or above 8 millions")
        inverses = torch.where(scales == 0, scales, 1 / scales).clamp_max(LARGEST_INVERSE)
        scaled = values * inverses
        whole = scaled.trunc()
        numbers = whole + ((scaled - whole) * 2).trunc()
        part = blocks[first : first + ROWS_AT_ONCE]
        part[..., :2] = stored_scales.view(torch.uint8)
        part[..., 2:] = numbers.to(torch.int8).view(torch.uint8)
    return blocks


def dequantize_blocks(blocks: Tensor) -> Tensor:
    """Return [out, in] float32, exactly the values of blocks [out, in / 32, 34] uint8."""
    scales = blocks[..., :2].contiguous().view(torch.float16).float()
    numbers = blocks[..., 2:].contiguous().view(torch.int8).float()
    return (numbers * scales).flatten(1)


def pack_blocks(blocks: Tensor) -> PackedWeight:
    """Copy blocks [out, in / 32, 34] uint8 into the order of the kernels, bit by bit."""
    outputs, count, _ = blocks.shape
    inputs = count * BLOCK_NUMBERS
    check_dense(blocks, "blocks", (torch.uint8,), (outputs, count, BLOCK_BYTES))
    numbers = allocate_huge_pages(round_up(outputs, BLOCK_OUTPUTS) * count * BLOCK_BYTES)
    load_kernels().pack_eights(blocks.data_ptr(), numbers.data_ptr(), inputs, outputs)
    return PackedWeight(numbers, outputs, inputs, EIGHT_BITS)


def unpack_blocks(weight: PackedWeight) -> Tensor:
    """Return the blocks [out, in / 32, 34] uint8 of a packed weight."""
    weight.check()
    count = weight.inputs // BLOCK_NUMBERS
    blocks = torch.empty(weight.outputs, count, BLOCK_BYTES, dtype=torch.uint8, device=CPU_DEVICE)
    load_kernels().unpack_eights(
        weight.numbers.data_ptr(), blocks.data_ptr(), weight.inputs, weight.outputs
    )
    return blocks
