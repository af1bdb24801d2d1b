"""What the layers of a model see, in the form that they take."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.trees.mask import chunk_mask, window_mask


def additive_masks(
    windows: Mapping[str, int | None],
    places: Tensor,
    seen: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    columns: int | None = None,
    repeated: int = 1,
) -> Any:
    """Additive [B, 1, N, T] masks by layer type; one tensor where all layers are alike.

    windows: by layer type (`layer_windows`). places: [B, T] positions. seen: [B, N, T] bool by the tree and the cache.
    columns: so many in the place of T, the ones behind unseen. repeated: all rows so many times, below one another.
    """
    masks = {}
    for kind, window in windows.items():
        near = {"sliding_attention": window_mask, "chunked_attention": chunk_mask}.get(kind)
        unseen = ~(seen & near(places, seen.shape[1], window) if near and window else seen).to(device)
        if columns:
            unseen = pad(unseen, (0, columns - unseen.shape[2]), value=True)
        additive = torch.zeros(unseen.shape, dtype=dtype, device=device)
        masks[kind] = additive.masked_fill_(unseen, torch.finfo(dtype).min)[:, None].repeat(1, 1, repeated, 1)
    return masks if len(masks) > 1 else masks.popitem()[1]
