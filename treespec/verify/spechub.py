"""SpecHub (Sun et al. 2024): two draws of which one is the likeliest token."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.trees.static import StaticTree, eagle
from treespec.trees.tree import Draws
from treespec.verify.greedy import rate
from treespec.verify.laws import (
    answer,
    check,
    counts,
    keep_first,
    overlap,
    ratio,
    sample_if_any,
    scale,
    without,
)
from treespec.verify.scheme import Drawing, Scheme


@final
@dataclass(frozen=True)
class SpecHub(Scheme):
    """a = argmax q; a draw i ~ q gives the pair (i, a), and (a, j) with j ~ q without a where i is
    a.

    At most two draws, else InputError. A node with one draw is `single`; so is one whose q is
    one-hot, as there is no second token then.
    """

    name: ClassVar[str] = "spechub"
    max_draws: ClassVar[int | None] = 2
    drawing: ClassVar[Drawing] = "greedy"
    default_tree: ClassVar[StaticTree] = eagle().narrowed(2)

    def draw(self, q: Tensor, k: int | Tensor, generator: torch.Generator) -> Draws:
        width, number = counts(q, k)
        check(self, q, width)
        first = sample_if_any(q, generator)
        top = q.argmax(-1, keepdim=True)
        second = torch.where(first == top, sample_if_any(without(q, top), generator), top)
        return Draws(keep_first(torch.cat([first, second], dim=1), number)[:, :width])

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        check(self, q, draws.tokens.shape[1])
        first, second = pad(draws.tokens, (0, 2 - draws.tokens.shape[1]), value=-1).split(1, dim=1)
        pair = second >= 0
        # The likelier of the two is a; of equals argmax takes the first.
        q1, q2 = q.gather(1, first.clamp(min=0)), q.gather(1, second.clamp(min=0))
        top_first = pair & ((q1 > q2) | ((q1 == q2) & (first < second)))
        a = torch.where(top_first, first, second)  # [B, 1], -1 for a single draw
        i = torch.where(top_first, second, first)
        at_a, at_i = a.clamp(min=0), i.clamp(min=0)

        # Masses of the pairs (i, a) and (a, i), [B, V] over i; a single draw is a pair of the first kind.
        second_top = without(q, a) * scale(q, first >= 0)
        q_a = q.gather(1, at_a) * scale(q, pair)
        first_top = second_top * (q_a * scale(second_top, pair))
        p_a = p.gather(1, at_a) * pair

        # Steps 1 and 2: p pays for i, first where a is second.
        p1 = without(p, a)
        p2 = (p1 - second_top).clamp_(min=0)
        p3 = (p2 - first_top).clamp_(min=0)
        accept_i = torch.where(
            top_first,
            ratio(p2.gather(1, at_i), first_top.gather(1, at_i)),
            ratio(p1.gather(1, at_i), second_top.gather(1, at_i)),
        ) * (i >= 0)

        # Steps 3 and 4: p(a) pays for what is left of the pairs, first where a is first.
        left_first = (first_top - p2).clamp_(min=0).sum(-1, keepdim=True)
        left_second = (second_top - p1).clamp_(min=0).sum(-1, keepdim=True)
        p_a2 = (p_a - left_first).clamp(min=0)
        p_a3 = (p_a2 - left_second).clamp(min=0)
        accept_a = torch.where(top_first, ratio(p_a, left_first), ratio(p_a2, left_second)) * pair

        # Step 5: the rest of p.
        rest = p3.scatter_add_(1, at_a, p_a3)
        return answer(
            p, rest, torch.cat([i, a], 1), torch.cat([accept_i, (1 - accept_i) * accept_a], 1)
        )

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor:
        """That of `greedy`, though two draws have another law."""
        check(self, q, k)
        return rate(p, q, q.argmax(-1, keepdim=True)) if k == 2 else overlap(p, q)
