"""Features in 8 bits a value, with a scale for each row of 64 values.

    feature [F] of a position      | 64 values | 64 values | … |
    scales                            0.013       0.21
    stored                            whole numbers from -127 to 127

A value is its number times its scale, so the largest value of a row sets the step of its others.
Layers have few values that are far larger than all others: short rows keep them from the rest.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ROW = 64  # values that share a scale
LARGEST = 127


def packed(features: Tensor, row: int = ROW) -> tuple[Tensor, Tensor]:
    """[T, F] features -> [T, F] int8 numbers, and [T, F / row] float16 scales, rounded up."""
    values = in_rows(features.float(), row)
    scales = (values.abs().amax(-1) / LARGEST).to(torch.float16)
    steps = scales.float()[..., None].clamp_min(torch.finfo(torch.float32).tiny)
    numbers = (values / steps).round().clamp(-LARGEST, LARGEST)  # the scale itself was rounded
    return numbers.flatten(-2)[..., : features.shape[-1]].to(torch.int8), scales


def unpacked(numbers: Tensor, scales: Tensor, dtype: torch.dtype, row: int = ROW) -> Tensor:
    """[T, F] features from what `packed` returned."""
    values = in_rows(numbers.float(), row) * scales.float()[..., None]
    return values.flatten(-2)[..., : numbers.shape[-1]].to(dtype)


def in_rows(values: Tensor, row: int) -> Tensor:
    """[T, F] -> [T, F / row, row], the last row filled with zeros."""
    return F.pad(values, (0, -values.shape[-1] % row)).unflatten(-1, (-1, row))


def bytes_of(width: int, row: int = ROW) -> int:
    """Bytes of `width` values."""
    return width + torch.float16.itemsize * -(-width // row)
