"""Refuse the draws of nodes in turn, and compute the weight of each for block verification.

The weight w of a node or draw is the probability to accept it if all nodes below it are refused.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from treespec.trees.tree import Draws
from treespec.verify.distributions import clamp_positive, mask_out


class RefusalStep(NamedTuple):
    """One draw at each of n nodes, after their earlier draws are refused; the last step is the nodes themselves.

    Attributes:
        draw_weight: [n, 1] w of the draws.
        residual: [n, V] w p without the mass of the refused draws.
        node_weight: [n, 1] w of the nodes so far.
    """

    draw_weight: Tensor
    residual: Tensor
    node_weight: Tensor


Refused: TypeAlias = Iterator[RefusalStep]


def refuse_in_order(p: Tensor, q: Tensor, draws: Draws, weight: Tensor) -> Refused:
    """Refuse draws without replacement in turn (2505.12398). On a chain this is block verification.

        root      w = 1
        child     w_c = min(1, w p/q)           p, q: the parent's distributions at the child's token
        refused   p <- norm (w p - q)+          the parent, after a child is refused
                  w <- S / (S + 1 - w)          S: the mass of (w p - q)+
                  q <- q without the child's token, normalised

    In a tree of depth 1 this is `rrs-wo`.

    Args:
        p, q: [n, V] probabilities of the target and of the draft.
        draws: of the nodes.
        weight: [n, 1] w of the nodes.

    Yields: a `RefusalStep` for each column of draws, and one for the nodes.
    """
    # 1. The mass of q without the earlier draws, which normalises it, and q at each draw. The mass is a
    #    sum of small numbers: 1 minus the mass of the draws would lose digits.
    token_index = draws.tokens.clamp(min=0)
    is_drawn = draws.tokens >= 0
    draw_probs = q.gather(1, token_index) * is_drawn
    remaining_mass = mask_out(q, draws.tokens).sum(-1, keepdim=True) + draw_probs.flip(1).cumsum(
        1
    ).flip(1)
    remaining_mass = clamp_positive(remaining_mass).masked_fill(
        ~is_drawn, torch.inf
    )  # [n, K]; by inf, q is 0
    draw_probs = clamp_positive(draw_probs / remaining_mass).masked_fill(~is_drawn, torch.inf)

    # 2. The residual starts as w p. An absent draw has w 0 and does not change it. We divide by the total
    #    because rounding can leave no mass if p and q are the same one-hot row.
    residual = p * weight
    columns = zip(
        token_index.split(1, dim=1),
        draw_probs.split(1, dim=1),
        remaining_mass.split(1, dim=1),
        strict=True,
    )
    for index, draw_prob, mass in columns:
        draw_weight = (residual.gather(1, index) / draw_prob).clamp(max=1)
        yield RefusalStep(draw_weight, residual, weight)
        residual = residual.addcdiv_(q, mass, value=-1).clamp_(min=0)
        residual_mass = residual.sum(-1, keepdim=True)
        total = clamp_positive(residual_mass + (1 - weight))
        residual = residual.div_(total)
        weight = residual_mass / total
    yield RefusalStep(weight, residual, weight)
