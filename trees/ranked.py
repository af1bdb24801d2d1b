"""Keeping the best candidates of a tree, with their parents in new numbers."""

import torch
from torch import Tensor


def best_first(scores: Tensor, count: int) -> Tensor:
    """[min(count, M)] numbers of the best candidates, best first. scores: [M].

    Of equal scores the earlier candidate wins, which is the shallower one.
    """
    return scores.sort(descending=True, stable=True).indices[:count]


def connect(kept: Tensor, parents: Tensor) -> Tensor:
    """[N] int64 the parents of the kept candidates, in their new numbers; -1 for the root.

    Five of seven candidates, those in brackets. They get the numbers 0 to 4 in their order:

             [0]              candidate   0  1  2  3  4  5  6        new number   0  1  2  3  4
           /  |  \\            parent      0  0  0  0  1  1  3        kept         0  1  3  5  6
        [1]   2   [3]                                                parents     -1  0  0  1  2
        / \\        |
       4   [5]    [6]

    kept: [N] ascending candidate numbers, first the root's 0; with a node its parent is kept.
    parents: [M] candidate numbers.
    """
    number = torch.full_like(parents, -1)
    number[kept] = torch.arange(len(kept), device=kept.device)
    result = number[parents[kept]]
    result[0] = -1
    return result
