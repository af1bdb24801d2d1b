"""Features in 8 bits a value, with a scale a row: for each position one a tapped layer.

    feature [F] of a position      | layer 2 | layer 16 | last state |
    scales                            0.013     0.21       0.094
    stored                            whole numbers from -127 to 127

A value is its number times its scale. So the largest value of a row sets the step of all others.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

LARGEST = 127


def packed(features: Tensor, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """[T, F] features -> [T, F] int8 numbers and [T, P] float32 scales of its P parts."""
    numbers, scales = [], []
    for part in features.float().split(list(widths), dim=-1):
        scale = part.abs().amax(-1, keepdim=True) / LARGEST
        numbers.append((part / scale.clamp_min(torch.finfo(torch.float32).tiny)).round())
        scales.append(scale)
    return torch.cat(numbers, dim=-1).to(torch.int8), torch.cat(scales, dim=-1)


def unpacked(numbers: Tensor, scales: Tensor, widths: Sequence[int], dtype: torch.dtype) -> Tensor:
    """[T, F] features from what `packed` returned."""
    parts = numbers.float().split(list(widths), dim=-1)
    rows = [part * scales[:, i : i + 1] for i, part in enumerate(parts)]
    return torch.cat(rows, dim=-1).to(dtype)
