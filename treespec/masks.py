"""What the layers of a model see, in the form that they take."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.trees.mask import attention_mask, chunk_mask


def additive_masks(
    windows: Mapping[str, int | None],
    ancestors: Tensor,
    depth: Tensor,
    lengths: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    columns: int | None = None,
) -> Any:
    """Additive [B, 1, N, end + N] masks by layer type; one tensor where all layers are alike.

    windows: by layer type (`layer_windows`); the rest as for `attention_mask`. columns: so many in the place of
    end + N, the ones behind unseen.
    """
    masks = {}
    for kind, window in windows.items():
        unseen = ~attention_mask(ancestors, depth, lengths, window if kind == "sliding_attention" else None)
        if kind == "chunked_attention" and window is not None:
            unseen |= ~chunk_mask(depth, lengths, window)
        if columns:
            unseen = pad(unseen, (0, columns - unseen.shape[2]), value=True)
        unseen = unseen.to(device)
        additive = torch.zeros(unseen.shape, dtype=dtype, device=device)
        masks[kind] = additive.masked_fill_(unseen, torch.finfo(dtype).min)[:, None]
    return masks if len(masks) > 1 else masks.popitem()[1]
