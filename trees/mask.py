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

import torch
from torch import Tensor


def ancestor_mask(parents: Tensor, max_depth: int) -> Tensor:
    """[N, N] bool: row i marks node i and the nodes above it. parents: [N] int64, parents[0] = -1.

    max_depth: no node lies deeper. Links are squared log2(max_depth) times, so there is no loop over nodes.
    """
    n = len(parents)
    above = torch.eye(n, device=parents.device)
    above[torch.arange(1, n, device=parents.device), parents[1:]] = 1
    for _ in range(max(max_depth - 1, 0).bit_length()):
        above = above @ above
    return above > 0


def attention_mask(ancestors: Tensor, depth: Tensor, past: int, window: int | None = None) -> Tensor:
    """[N, past + N] bool: what each node sees of the cache and of the tree.

    ancestors: [N, N] bool. depth: [N] int64; node i stands at position past + depth[i]. window: how many
    positions a sliding layer sees, itself included; None sees all. A node's own branch has consecutive
    depths, so a window over positions cuts its oldest ancestors, not its siblings' columns.
    """
    committed = torch.ones(len(depth), past, dtype=torch.bool, device=depth.device)
    visible = torch.cat([committed, ancestors], dim=1)
    if window is None:
        return visible
    positions = torch.cat([torch.arange(past, device=depth.device), past + depth])
    return visible & (positions[None, :] > past + depth[:, None] - window)


def chunk_mask(depth: Tensor, past: int, chunk: int) -> Tensor:
    """[N, past + N] bool: same chunk of `chunk` positions (Llama 4's local attention), to be and-ed."""
    positions = torch.cat([torch.arange(past, device=depth.device), past + depth])
    return positions[None, :] // chunk == (past + depth)[:, None] // chunk
