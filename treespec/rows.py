"""Rows of several texts in one tensor, the shorter ones filled up, and what they are again."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def together(rows: Sequence[Tensor]) -> Tensor:
    """[n, ...] of each text -> [B, N, ...], filled up with zeros; a single one is not copied."""
    return rows[0][None] if len(rows) == 1 else pad_sequence(list(rows), batch_first=True)


def unpadded(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """[B, N, ...] -> [sum of sizes, ...]: the first so many of each row, one after another."""
    if min(sizes) == rows.shape[1]:
        return rows.flatten(0, 1)
    return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])


def rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """[B, N, ...] and [B, F] -> [B, F, ...]: of each text its own rows."""
    b, n = x.shape[:2]
    if b > 1:
        rows = rows + torch.arange(0, b * n, n, device=rows.device)[:, None]
    return x.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, (b, -1))
