"""Attention of blocks at sampled anchors, for training.

An anchor is a row of the context from which a block starts. A block's rows, one in each slot, see the context up to
their anchor and the rows of their block, so no mask is between blocks. Anchors 1 and 4 of six rows, blocks of three:

    keys          context        own block
    anchor 1      x x . . . .    x x x
    anchor 4      x x x x x .    x x x

A slot is computed for all anchors at once, over score columns and context (`treespec.heads.unrolled`), so the memory
grows with anchors times context. Query heads that share a kv head become further rows, since fused kernels with a
mask take no grouped heads.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from treespec.heads.layers import Angles, Attention
from treespec.heads.unrolled import (
    AttentionColumns,
    add_own_values,
    add_score_channels,
    add_score_columns,
    score_own_columns,
)

CHANNEL_ALIGNMENT = 8  # fused kernels with a mask take multiples of it


def build_slot_masks(
    anchors: Tensor, columns: int, size: int, causal: bool, window: int | None
) -> list[Tensor]:
    """Build for each slot the mask [B, A, S + R] bool of the block's score columns and the context.

    Args:
        anchors: [B, A] int64 the rows of the context.
        columns: R of the context.
        size: S, the number of slots.
        causal: whether a slot sees no later slots.
        window: the number of positions that a row sees, its own included; None: all.
    """
    places = torch.arange(columns, device=anchors.device)
    numbers = torch.arange(1, size + 1, device=anchors.device)
    up_to_anchor = places <= anchors[..., None]
    masks: list[Tensor] = []
    for number in range(1, size + 1):
        own = torch.ones_like(numbers, dtype=torch.bool)
        context = up_to_anchor
        if causal:
            own = own & (numbers <= number)
        if window is not None:
            own = own & (numbers > number - window)
            context = context & (places > anchors[..., None] + number - window)
        elif not causal and masks:
            masks.append(masks[0])
            continue
        masks.append(torch.cat([own.expand(anchors.shape + (size,)), context], dim=-1))
    return masks


def attend_anchors(
    attention: Attention,
    context: AttentionColumns,
    masks: Sequence[Tensor],
    x: Tensor,
    angles: Angles,
) -> Tensor:
    """Compute a layer's attention of blocks at anchors, slot by slot.

    Args:
        attention: the layer's attention.
        context: keys and values [B, kv heads, R, D] of the fused features.
        masks: of `build_slot_masks`.
        x: [S B, A, H] the rows of all slots, slot after slot.
        angles: cos and sin of the rows.

    Returns:
        [S B, A, H].
    """
    # 1. The slots' own columns, and the score columns before the context.
    size = len(masks)
    parts = attention.project(x, angles)
    slots = [
        AttentionColumns(keys, values)
        for keys, values in zip(parts.keys.chunk(size), parts.values.chunk(size), strict=True)
    ]
    columns = add_score_columns(context, size)
    missing = -columns.keys.shape[-1] % CHANNEL_ALIGNMENT
    keys = F.pad(columns.keys, (0, missing))
    values = F.pad(columns.values, (0, missing))

    # 2. Each slot: query heads of a group are rows of their kv head.
    groups = parts.queries.shape[1] // keys.shape[1]
    folded: dict[int, Tensor] = {}
    out = []
    for queries, mask in zip(parts.queries.chunk(size), masks, strict=True):
        if id(mask) not in folded:
            folded[id(mask)] = mask.repeat(1, groups, 1)[:, None]
        extended = add_score_channels(queries, score_own_columns(queries, slots))
        grouped = F.pad(extended, (0, missing)).unflatten(1, (-1, groups))
        attended = F.scaled_dot_product_attention(
            grouped.flatten(2, 3),
            keys,
            values,
            folded[id(mask)],
            scale=attention.head_dim**-0.5,
        )
        rows = attended.unflatten(2, (groups, -1)).flatten(1, 2)
        out.append(add_own_values(rows, slots, queries.shape[-1]))
    return attention.extend(torch.cat(out))
