"""SpecHub (Sun et al. 2024): two draws; one is the most likely token of q, the hub.

Let a be the most likely token. The draws are pairs, and every pair holds a:

    (i, a)  with probability q(i)              for each i but a
    (a, j)  with probability q(a) q(j)/(1 - q(a))

Because every pair holds a, the transport from pairs to output tokens has a closed form. Each
token i first takes mass from its two pairs, up to p(i); then a takes mass that remains on any pair, up to p(a).
Five tokens, a = 2, and the draws 3 and 2:

    q                   .1   .2   .3   .2   .2
    p                   .4   .3   .2   .1   0       i = 3 is output with .1 / .2 = 1/2
    mass of (i, a)      .1   .2        .2   .2      remains 0 0 . .1 .2, in all .3
    mass of (a, i)      3/70 3/35      3/35 3/35    remains 0 0 . 3/35 3/35, in all 6/35
    p(a)                .2 - 6/35 = 1/35 for (i, a): a is output with (1/2) (1/35) / .3 = 1/21
    residual            9/35 1/70 0    0    0
    plan                3/7  1/42 1/21 1/2  0
    acceptance rate     51/70, as of `greedy`
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

        # 1. Which of the draws is a: the likelier draw, and of equally likely ones the smaller token, as argmax has it.
        q1 = q.gather(1, first.clamp(min=0))
        q2 = q.gather(1, second.clamp(min=0))
        top_first = pair & ((q1 > q2) | ((q1 == q2) & (first < second)))
        a = torch.where(top_first, first, second)  # [B, 1], -1 for a single draw
        i = torch.where(top_first, second, first)
        at_a = a.clamp(min=0)
        at_i = i.clamp(min=0)

        # 2. Masses of the pairs, [B, V] over i: (i, a) and (a, i). A single draw counts as a pair (i, a).
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

        # 4. p(a) pays for the remaining mass on the pairs, first for (a, i), then for (i, a).
        unpaid = (pairs - budget).clamp_(min=0).sum(-1, keepdim=True)  # [2, B, 1]
        p_a2 = (p_a - unpaid[1]).clamp(min=0)
        accept_a = divide_probabilities(torch.stack([p_a2, p_a]), unpaid) * pair
        accept_i = torch.where(top_first, accept_i[1], accept_i[0])
        accept_a = torch.where(top_first, accept_a[1], accept_a[0])

        # 5. The residual is the mass of p that has paid for nothing.
        residual = (
            (p2 - first_top).clamp_(min=0).scatter_add_(1, at_a, (p_a2 - unpaid[0]).clamp(min=0))
        )
        accepted = torch.cat([accept_i, (1 - accept_i) * accept_a], 1)
        return plan_from_acceptance(p, residual, torch.cat([i, a], 1), accepted)

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor:
        """Return [B] the rate of `greedy`: its two draws have another distribution, and the same acceptance rate."""
        if k == 2:
            return compute_greedy_acceptance(p, q, q.argmax(-1, keepdim=True))
        return overlap(p, q)
