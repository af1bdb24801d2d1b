"""Masks: which nodes and which columns of the cache each node of a token tree attends to.

The five-node example of this package, node 0 being the root:

      0            row i: the nodes that node i attends to
     / \\                0 1 2 3 4
    1   2           0    x
    |   |           1    x x
    3   4           2    x . x
                    3    x x . x
parents -1 0 0 1 2  4    x . x . x

Below, two texts of 3 and 1 committed positions share a cache. Both have the example as their tree.
A forward writes both trees at column 3, behind the longer text:

    columns              0 1 2 | 3 4 5 6 7      `compute_positions`       node 4 sees (`build_attention_mask`)
    first text           a b c | 0 1 2 3 4      0 1 2 3 4 4 5 5   x x x x . x . x
    second text          p . . | 0 1 2 3 4      0 1 2 1 2 2 3 3   x . . x . x . x
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from treespec.trees.tree import build_range, cache_tensor, to_device


def build_ancestor_mask(parents: Tensor) -> Tensor:
    """[..., N, N] bool: row i marks node i and its ancestors.

    parents: [..., N] int64, parents[0] = -1 and parents[i] < i.
    With P the matrix that has 1 at each node's parent, (1 + P)^-1 = 1 - P + P² - …: node i has ±1 at
    its ancestors, as one path leads to each, and 0 elsewhere.
    """
    n = parents.shape[-1]
    device = parents.device
    above = torch.empty(*parents.shape, n, device=device)
    torch.eq(parents[..., None], build_range(n, device), out=above)
    itself = cache_tensor(torch.eye, n, device=device).expand_as(above)
    return torch.linalg.solve_triangular(above, itself, upper=False, unitriangular=True) != 0


def build_attention_mask(seen: Tensor, places: Tensor) -> Tensor:
    """[B, N, T] bool: the columns of its own text and of its own tree that each node sees.

    seen: [B, N, U] bool, which of the last U columns each of the last N sees: `build_ancestor_mask`, or
    that and the nodes of earlier forwards. places: [B, T] int64 positions of all columns
    (`compute_positions`). A text ends where its root stands, in the first of the U columns; a column before
    them is empty if its position is the root's or a later one.
    """
    n, u = seen.shape[1:]
    text_columns = (places[:, :-u] < places[:, -u, None])[:, None]
    return torch.cat([text_columns.expand(-1, n, -1), seen], dim=2)


def build_window_mask(places: Tensor, nodes: int, window: int) -> Tensor:
    """[B, N, T] bool: the columns inside the sliding window of each of the last N columns.

    A layer's mask is this one and `build_attention_mask`. In the drawing, a window of 2 leaves node 4 its
    parent, node 2, and itself.

    places: [B, T] positions of all columns (`compute_positions`).
    nodes: N.
    window: positions that a node sees, its own included. Depths along a branch are consecutive, so
    a window over positions cuts a node's oldest ancestors, whatever columns its siblings fill.
    """
    return places[:, None] > places[:, -nodes:, None] - window


def chunk_mask(places: Tensor, nodes: int, chunk: int) -> Tensor:
    """[B, N, T] bool: the columns in the same chunk of positions (Llama 4's local attention).

    In the drawing, chunks of 4 positions leave node 4 of the first text its parent and itself.

    places, nodes: as for `build_window_mask`. chunk: positions of a chunk.
    """
    chunks = places // chunk
    return chunks[:, None] == chunks[:, -nodes:, None]


def build_committed_mask(lengths: Sequence[int], device: torch.device) -> Tensor:
    """[B, 1, end] bool: the columns that hold each text, up to the end of the longest.

    Texts of 3 and 1 positions, as in the drawing:

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
    """[1, 1, 2 size] bool: true in the first half."""
    return (build_range(2 * size, device) < size)[None, None]


def compute_positions(depth: Tensor, lengths: Sequence[int]) -> Tensor:
    """[B, end + N] int64: the position in its text of every cache column and of every tree node.

    depth: [B, N] int64. A node stands at position length + depth of its text.
    lengths: committed positions of each of the B texts. The trees start at column `end`, the
    longest of them.
    """
    earlier = build_range(max(lengths), depth.device).expand(len(depth), -1)
    if len(lengths) == 1:
        return torch.cat([earlier, lengths[0] + depth], dim=1)
    roots = cache_tensor(to_device, tuple(lengths), depth.device)[:, None]
    return torch.cat([earlier, roots + depth], dim=1)
