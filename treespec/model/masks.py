"""Batching texts into one forward: padding, gathering, and the attention masks of each layer type."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from treespec.trees.mask import chunk_mask, window_mask


def additive_masks(
    windows: Mapping[str, int | None],
    places: Tensor,
    seen: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    repeated: int = 1,
) -> Any:
    """Additive [B, 1, N, T] masks by layer type, or one tensor where the model has one layer type.

    windows: by layer type (`layer_windows`). places: [B, T] positions. seen: [B, N, T] bool by the tree and the cache.
    repeated: how often each mask's rows stand below one another (`attention.repeats`).
    """
    masks = {}
    for kind, window in windows.items():
        near = {"sliding_attention": window_mask, "chunked_attention": chunk_mask}.get(kind)
        unseen = ~(seen & near(places, seen.shape[1], window) if near and window else seen).to(
            device
        )
        additive = torch.zeros(unseen.shape, dtype=dtype, device=device)
        masks[kind] = additive.masked_fill_(unseen, torch.finfo(dtype).min)[:, None].repeat(
            1, 1, repeated, 1
        )
    return masks if len(masks) > 1 else masks.popitem()[1]


def together(rows: Sequence[Tensor]) -> Tensor:
    """[n, ...] of each text -> [B, N, ...], padded with zeros; a single text is not copied."""
    return rows[0][None] if len(rows) == 1 else pad_sequence(list(rows), batch_first=True)


def unpadded(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """[B, N, ...] -> [sum of sizes, ...]: the first `sizes[row]` entries of each batch row, concatenated."""
    if min(sizes) == rows.shape[1]:
        return rows.flatten(0, 1)
    return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])


def rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """Gather in each text: [B, N, ...] and indices [B, F] -> [B, F, ...]."""
    b, n = x.shape[:2]
    if b > 1:
        rows = rows + torch.arange(0, b * n, n, device=rows.device)[:, None]
    return x.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, (b, -1))
