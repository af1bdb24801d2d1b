"""Builds masks: which tree nodes and which cache columns each node of a token tree attends to.

The five-node example of this package; node 0 is the root:

      0            row i: the nodes that node i attends to
     / \\                0 1 2 3 4
    1   2           0    x
    |   |           1    x x
    3   4           2    x . x
                    3    x x . x
parents -1 0 0 1 2  4    x . x . x

Below, two sequences of 3 and 1 committed positions share a cache. Both have the example as their tree.
A forward writes both trees from column 3 on, where the longer sequence ends:

                                                `compute_positions`   node 4 sees
    columns              0 1 2 | 3 4 5 6 7      of all columns        (`build_attention_mask`)
    first sequence       a b c | 0 1 2 3 4      0 1 2 3 4 4 5 5       x x x x . x . x
    second sequence      p . . | 0 1 2 3 4      0 1 2 1 2 2 3 3       x . . x . x . x
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from treespec.trees.tree import build_range, cache_tensor, to_device


def build_ancestor_mask(parents: Tensor) -> Tensor:
    """Returns [..., N, N] bool: row i marks node i and its ancestors.

    parents: [..., N] int64, parents[0] = -1 and parents[i] < i.

    Let P[i, parents[i]] = 1. The inverse (1 + P)^-1 = 1 - P + P² - … is ±1 at a node and its ancestors,
    because exactly one path leads up to each of them, and 0 elsewhere.
    """
    n = parents.shape[-1]
    device = parents.device
    above = torch.empty(*parents.shape, n, device=device, dtype=torch.float32)
    torch.eq(parents[..., None], build_range(n, device), out=above)
    itself = cache_tensor(torch.eye, n, device=device).expand_as(above)
    return torch.linalg.solve_triangular(above, itself, upper=False, unitriangular=True) != 0


def mark_ancestors(parents: Sequence[int]) -> Tensor:
    """Returns [N, N] bool on the host, as `build_ancestor_mask`: a node's row is its parent's row and itself."""
    n = len(parents)
    marks = bytearray(n * n)  # row by row
    for node, parent in enumerate(parents):
        row = node * n
        if 0 <= parent < node:
            marks[row : row + n] = marks[parent * n : parent * n + n]
        marks[row + node] = 1
    return torch.frombuffer(marks, dtype=torch.bool).view(n, n)


def build_attention_mask(seen: Tensor, positions: Tensor) -> Tensor:
    """Returns [B, N, T] bool: the columns of its sequence and of its tree that each node sees.

    The first of the last U columns holds the root, whose position is the length of the sequence. So a column
    before them is empty if its position is the root's or a later one.

    seen: [B, N, U] bool, which of the last U columns each of the last N columns sees:
        `build_ancestor_mask`, with the nodes of earlier forwards before it if there are any.
    positions: [B, T] int64, of all columns (`compute_positions`).
    """
    n, u = seen.shape[1:]
    committed = (positions[:, :-u] < positions[:, -u, None])[:, None]
    return torch.cat([committed.expand(-1, n, -1), seen], dim=2)


def build_window_mask(positions: Tensor, nodes: int, window: int) -> Tensor:
    """Returns [B, N, T] bool: the columns inside the sliding window of each of the last N columns.

    A layer's mask is the intersection of this one and `build_attention_mask`. In the drawing, node 4 with a
    window of 2 sees its parent, node 2, and itself.

    The window counts positions, not columns. Depths along a branch are consecutive, so it cuts a node's
    oldest ancestors, no matter how many columns its siblings fill.

    positions: [B, T] of all columns (`compute_positions`).
    nodes: N.
    window: positions that a node sees, including its own.
    """
    return positions[:, None] > positions[:, -nodes:, None] - window


def chunk_mask(positions: Tensor, nodes: int, chunk: int) -> Tensor:
    """Returns [B, N, T] bool: the columns in the same chunk of positions (Llama 4's local attention).

    In the drawing, node 4 of the first sequence with chunks of 4 positions sees its parent and itself.

    positions, nodes: as for `build_window_mask`. chunk: positions of a chunk.
    """
    chunks = positions // chunk
    return chunks[:, None] == chunks[:, -nodes:, None]


def build_committed_mask(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Returns [B, 1, end] bool: the columns that hold each sequence, up to the end of the longest.

    Sequences of 3 and 1 positions, as in the drawing:

        first     x x x
        second    x . .
    """
    end = max(lengths)
    if len(lengths) > 1:
        return (
            build_range(end, device)
            < cache_tensor(to_device, tuple(lengths), device)[:, None, None]
        )
    size = 1 << end.bit_length()
    return cache_tensor(build_first_half_mask, size, device)[..., size - lengths[0] :][..., :end]


def build_first_half_mask(size: int, device: torch.device) -> Tensor:
    """Returns [1, 1, 2 size] bool: true in the first half."""
    return (build_range(2 * size, device) < size)[None, None]


def compute_positions(depth: Tensor, lengths: Sequence[int]) -> Tensor:
    """Returns [B, end + N] int64: the position of every cache column and of every tree node.

    A node has the position length + depth. The trees begin at column `end`, the largest length.

    depth: [B, N] int64, of the nodes. lengths: committed positions of each of the B sequences.
    """
    earlier = build_range(max(lengths), depth.device).expand(len(depth), -1)
    if len(lengths) == 1:
        return torch.cat([earlier, lengths[0] + depth], dim=1)
    roots = cache_tensor(to_device, tuple(lengths), depth.device)[:, None]
    return torch.cat([earlier, roots + depth], dim=1)
