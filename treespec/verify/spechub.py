"""SpecHub (Sun et al. 2024): two draws, one of which is the most likely token of q, the hub.

Let a be the most likely token. The draws are pairs, and every pair holds a:

    (i, a)  with probability q(i)              for each i but a
    (a, j)  with probability q(a) q(j)/(1 - q(a))

With one token in every pair, the transport from pairs to output tokens has a closed form. Each
token i first takes what p(i) allows of its own two pairs; then a takes what p(a) allows of the
mass that is left on all pairs.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.trees.static import build_eagle_tree
from treespec.trees.tree import Draws
from treespec.verify.distributions import (
    divide_probabilities,
    draw_iid_children,
    keep_first,
    mask_out,
    overlap,
    plan_from_acceptance,
    scale,
)
from treespec.verify.scheme import Scheme
from treespec.verify.single import compute_greedy_acceptance


@final
@dataclass(frozen=True)
class SpecHub(Scheme):
    """A draw i ~ q and the most likely token a; where i is a, a second draw from q without a.

    A node with one draw is verified as by `single`. So is a node whose q is one-hot, because no
    second token exists.
    """

    name = "spechub"
    max_draws = 2
    drawing = "greedy"
    random_draws = "the first"
    default_tree = build_eagle_tree().limit_draws(2)

    def make(self, q: Tensor, width: int, number: Tensor, generator: torch.Generator) -> Draws:
        first = draw_iid_children(q, 1, generator)
        top = q.argmax(-1, keepdim=True)
        second = torch.where(first == top, draw_iid_children(mask_out(q, top), 1, generator), top)
        return Draws(keep_first(torch.cat([first, second], dim=1), number)[:, :width])

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        first, second = pad(draws.tokens, (0, 2 - draws.tokens.shape[1]), value=-1).split(1, dim=1)
        pair = second >= 0

        # 1. Which of the draws is a: the likelier one, and of equals the first, as by argmax.
        q1 = q.gather(1, first.clamp(min=0))
        q2 = q.gather(1, second.clamp(min=0))
        top_first = pair & ((q1 > q2) | ((q1 == q2) & (first < second)))
        a = torch.where(top_first, first, second)  # [B, 1], -1 for a single draw
        i = torch.where(top_first, second, first)
        at_a = a.clamp(min=0)
        at_i = i.clamp(min=0)

        # 2. Masses of the pairs, [B, V] over i: (i, a), of which a single draw is one, and (a, i).
        second_top = mask_out(q, a) * scale(q, first >= 0)
        q_a = q.gather(1, at_a) * scale(q, pair)
        first_top = second_top * (q_a * scale(second_top, pair))
        p_a = p.gather(1, at_a) * pair

        # 3. p(i) pays for output i, first for the pairs (i, a), then for the pairs (a, i).
        pairs = torch.stack([second_top, first_top])  # [2, B, V]
        p1 = mask_out(p, a)
        p2 = (p1 - second_top).clamp(min=0)
        budget = torch.stack([p1, p2])
        accept_i = divide_probabilities(budget, pairs).gather(-1, at_i.expand(2, -1, -1)) * (i >= 0)

        # 4. p(a) pays for the mass left on the pairs, first for (a, i), then for (i, a).
        left = (pairs - budget).clamp_(min=0).sum(-1, keepdim=True)  # [2, B, 1]
        p_a2 = (p_a - left[1]).clamp(min=0)
        accept_a = divide_probabilities(torch.stack([p_a2, p_a]), left) * pair
        accept_i = torch.where(top_first, accept_i[1], accept_i[0])
        accept_a = torch.where(top_first, accept_a[1], accept_a[0])

        # 5. The residual is the rest of p.
        rest = (p2 - first_top).clamp_(min=0).scatter_add_(1, at_a, (p_a2 - left[0]).clamp(min=0))
        accepted = torch.cat([accept_i, (1 - accept_i) * accept_a], 1)
        return plan_from_acceptance(p, rest, torch.cat([i, a], 1), accepted)

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor:
        """The rate of `greedy`, which has another distribution of two draws but accepts as much."""
        if k == 2:
            return compute_greedy_acceptance(p, q, q.argmax(-1, keepdim=True))
        return overlap(p, q)
