"""Batching texts into one forward: padding, the masks of each layer type, and chunks of prompts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from treespec.model.cache import TreeCache
from treespec.trees.mask import (
    build_attention_mask,
    build_window_mask,
    chunk_mask,
    compute_positions,
)
from treespec.trees.tree import TokenTree, build_range, to_device

# As a decoder takes them: one mask, or one for each layer type; None without attention.
Masks = Tensor | dict[str, Tensor] | None
SLIDING_TYPES = ("sliding_attention", "hybrid_sliding")


def build_additive_masks(
    windows: Mapping[str, int | None],
    columns: Callable[[int | None], Tensor],
    seen: Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """Build additive masks [B, 1, N, T] by layer type.

    An entry is 0 where a node sees a column, else the lowest number of the dtype. Two committed
    columns and a tree of three nodes, positions 0 1 | 2 3 3, under a window of 2 positions:

                 full               sliding
        node 0   0 0 | 0 - -        - 0 | 0 - -
        node 1   0 0 | 0 0 -        - - | 0 0 -
        node 2   0 0 | 0 - 0        - - | 0 - 0

    Args:
        windows: {layer type: its window or chunk} (`treespec.model.support.detect_layer_windows`).
        columns: (window) -> [B, T] positions of the columns that layers of that window attend to.
        seen: [B, N, U] bool, the uncommitted columns that each node sees without windows.
        dtype: of the masks.
        device: of the masks.
    """
    masks = {}
    nodes = seen.shape[1]
    for kind, window in windows.items():
        positions = columns(window)
        visible = build_attention_mask(seen, positions)
        if window and kind in SLIDING_TYPES:
            visible &= build_window_mask(positions, nodes, window)
        elif window:
            visible &= chunk_mask(positions, nodes, window)
        masks[kind] = to_additive_mask(to_device(visible, device), dtype)[:, None]
    return masks


def as_taken(masks: dict[str, Tensor]) -> Masks:
    """Convert masks by layer type to what a decoder takes: one mask if there is one type."""
    if len(masks) > 1:
        return masks
    return next(iter(masks.values()), None)


def to_additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask of the same shape to add to attention scores: 0 if `visible`, else the lowest number."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


class TreeBatch(NamedTuple):
    """The nodes of B trees, padded: tokens [B, N], depth [B, N], ancestors [B, N, N]."""

    tokens: Tensor
    depth: Tensor
    ancestors: Tensor


def pad_trees(trees: Sequence[TokenTree]) -> TreeBatch:
    """Pad and stack the nodes of B trees.

    Smaller trees are padded with nodes of token 0 that see only themselves. Trees of five nodes
    and of three, after texts of three tokens and of one:

        columns   | a b c | 0 1 2 3 4 |
                  | p . . | 0 1 2 . . |
    """
    tokens = pad_and_stack([tree.tokens for tree in trees]).clamp_min(0)
    depth = pad_and_stack([tree.depth for tree in trees])
    sizes = {len(tree.tokens) for tree in trees}
    if len(sizes) == 1:
        return TreeBatch(tokens, depth, pad_and_stack([tree.ancestors for tree in trees]))
    itself = torch.eye(tokens.shape[1], dtype=torch.bool, device=depth.device)
    ancestors = itself.repeat(len(trees), 1, 1)
    for row, tree in enumerate(trees):
        n = len(tree.tokens)
        ancestors[row, :n, :n] = tree.ancestors
    return TreeBatch(tokens, depth, ancestors)


def pad_and_stack(rows: Sequence[Tensor]) -> Tensor:
    """Stack [n, ...] of each text to [B, N, ...], padded with zeros. A single text is not copied."""
    if len(rows) == 1:
        return rows[0][None]
    size = max(map(len, rows))
    parts = list(rows)
    if min(map(len, rows)) < size:
        zeros = rows[0].new_zeros((size,) + rows[0].shape[1:])
        parts = []
        for row in rows:
            parts.append(row)
            parts.append(zeros[len(row) :])
    return torch.cat(parts).unflatten(0, (len(rows), size))


def unpad_rows(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return [sum of sizes, ...]: the first `sizes[row]` entries of each batch row of [B, N, ...]."""
    if sum(sizes) == rows.shape[0] * rows.shape[1]:
        return rows.flatten(0, 1)
    return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return [B, F, ...]: the entries of [B, N, ...] at the indices `rows` [B, F] of each text."""
    b, n = x.shape[:2]
    if b > 1:
        rows = rows + build_range(b * n, rows.device)[::n, None]
    return x.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, (b, -1))


@dataclass(frozen=True)
class Chunk:
    """Up to n new positions of each of B texts, as a chain. Shorter texts are padded.

    The first text has 2 committed and 3 new positions, the second 4 committed and 1 new:

        | a b . . | 0 1 2 |    position 1 of the first sees    a b 0 1        positions  2 3 4
        | p q r s | 0 . . |    position 0 of the second sees   p q r s 0                 4 . .

    Attributes:
        columns: the chunk's slice of all new positions.
        taken: by text, positions of the chunk that it has; the others are padding.
        places: [B, T] int64, the position in its text of each column of cache and chunk.
        causal: [B, n, n] bool, the columns of the chunk that each new position sees.
    """

    columns: slice
    taken: list[int]
    places: Tensor
    causal: Tensor

    @cached_property
    def seen(self) -> Tensor:
        """[B, n, T] bool: the columns of cache and chunk that each new position sees."""
        return build_attention_mask(self.causal, self.places)

    @property
    def positions(self) -> Tensor:
        """[B, n] int64: the position in its text of each new token."""
        return self.places[:, -self.causal.shape[1] :]


def split_causal_chunks(
    cache: TreeCache,
    counts: Sequence[int],
    size: Callable[[int], int],
    device: torch.device,
) -> Iterator[Chunk]:
    """Yield chunks for the caller to forward. The cache commits each chunk before the next.

    Args:
        cache: of the texts.
        counts: new positions of each text.
        size: (columns of the cache) -> the largest number of positions in the next chunk.
        device: of the chunks' tensors.
    """
    start = 0
    while start < max(counts):
        end = cache.end
        chunk_size = min(size(end), max(counts) - start)
        taken_counts = [max(0, min(count - start, chunk_size)) for count in counts]
        depth = build_range(chunk_size, device).expand(len(counts), chunk_size)
        if min(cache.lengths) == end:  # no gap: a column's number is its position
            positions = build_range(end + chunk_size, device).expand(len(counts), -1)
        else:
            positions = compute_positions(depth, cache.lengths)
        causal = depth[:, None] <= depth[..., None]
        yield Chunk(slice(start, start + chunk_size), taken_counts, positions, causal)
        cache.commit([range(chunk_tokens) for chunk_tokens in taken_counts])
        start += chunk_size
