"""Who sees whom in a token tree.

The five-node example of this package, node 0 being the root:

      0            row i: the nodes that node i attends to
     / \\                0 1 2 3 4
    1   2           0    x
    |   |           1    x x
    3   4           2    x . x
                    3    x x . x
parents -1 0 0 1 2  4    x . x . x
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def ancestor_mask(parents: Tensor, max_depth: int) -> Tensor:
    """[N, N] bool: row i marks node i and the nodes above it. parents: [N] int64, parents[0] = -1.

    max_depth: no node lies deeper. Links are squared log2(max_depth) times, so there is no loop
    over nodes.
    """
    n = len(parents)
    above = torch.eye(n, device=parents.device)
    above[torch.arange(1, n, device=parents.device), parents[1:]] = 1
    for _ in range(max(max_depth - 1, 0).bit_length()):
        above = (above @ above).clamp_max(1)  # sums of many paths would overflow
    return above > 0


def attention_mask(ancestors: Tensor, depth: Tensor, lengths: Sequence[int]) -> Tensor:
    """[B, N, end + N] bool: what each node sees of its own text's cache and of its own tree.

    ancestors: [B, N, N] bool. depth: [B, N] int64; a node stands at position length + depth.
    lengths: committed positions of each of B texts; all trees are written at column `end`, behind
    the longest.
    """
    return torch.cat(
        [committed(lengths, depth.device).expand(-1, depth.shape[1], -1), ancestors], dim=2
    )


def window_mask(places: Tensor, nodes: int, window: int) -> Tensor:
    """[B, N, T] bool: what a sliding layer lets the last N of T columns see, to be and-ed.

    places: [B, T] as by `positions`. window: how many positions, a node's own included. A node's
    own branch has consecutive depths, so a window over positions cuts its oldest ancestors, not its
    siblings' columns.
    """
    return places[:, None] > places[:, -nodes:, None] - window


def chunk_mask(places: Tensor, nodes: int, chunk: int) -> Tensor:
    """[B, N, T] bool: same chunk of `chunk` positions (Llama 4's local attention), as for
    `window_mask`.
    """
    chunks = places // chunk
    return chunks[:, None] == chunks[:, -nodes:, None]


def committed(lengths: Sequence[int], device: torch.device) -> Tensor:
    """[B, 1, end] bool: the columns of a cache that hold each text, up to the end of the longest."""
    return (
        torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]
    )[:, None]


def positions(depth: Tensor, lengths: Sequence[int]) -> Tensor:
    """[B, end + N] where the tokens of a cache's columns and of the trees behind them stand in
    their texts.
    """
    columns = torch.arange(max(lengths), device=depth.device).expand(len(depth), -1)
    return torch.cat([columns, torch.tensor(lengths, device=depth.device)[:, None] + depth], dim=1)
