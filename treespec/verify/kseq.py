"""Sequential selection over independent drafts (Sun et al. 2023, SpecTr)."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from treespec.trees.tree import Draws
from treespec.verify.distributions import (
    Independent,
    clamp_positive,
    divide_probabilities,
    plan_from_acceptance,
    scale,
    subtract,
)


def share_mass(p: Tensor, q: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """Return [B, V] min(p/ρ, q), and its sum β [B, 1] in float64. rho: [B, 1] ρ."""
    both = torch.minimum(p / rho.to(p.dtype), q)
    return both, both.sum(-1, keepdim=True).double()


def find_smallest_rho(p: Tensor, q: Tensor, number: Tensor) -> Tensor:
    """Return [B, 1] float64 the ρ in [1, K] that solves 1 - (1 - β)^K = ρβ, rounded up.

    number: [B, 1] K. β depends on ρ (`share_mass`). The left side falls with ρ and the right side
    grows, so bisection finds the solution. Any larger ρ is lossless too and accepts less.
    """
    low = torch.ones_like(number, dtype=torch.float64)
    high = number.clamp(min=1).double()
    for _ in range(int(torch.finfo(p.dtype).bits * 0.85)):  # the mantissa's bits and a few for K
        middle = (low + high) / 2
        _, beta = share_mass(p, q, middle)
        enough = 1 - (1 - beta) ** number <= middle * beta
        low = middle.where(~enough, low)
        high = middle.where(enough, high)
    return high


@final
@dataclass(frozen=True)
class KSeq(Independent):
    """Independent draws, each accepted in its turn with min(1, p/(ρq)).

    β is the probability to accept a draw, so 1 - (1 - β)^K is the acceptance rate. If all draws are refused,
    the output comes from norm (p - min(q, p/ρ) (1 - (1 - β)^K)/β). The rate is at least 1 - 1/e of the optimum for
    independent draws. For one draw ρ is 1, and this is `single`. Of five tokens 2 and then 3 are drawn:

        q                   .1   .2   .3   .2   .2
        p                   .4   .3   .2   .1   0       ρ = 1.5
        min(p/ρ, q)         .1   .2   2/15 1/15 0       β = .5
        min(1, p/(ρq))      1    1    4/9  1/3  0       draw 2 is accepted with 4/9, then draw 3 with 1/3
        residual            1    0    0    0    0
        plan                10/27 0   4/9  5/27 0
        acceptance rate     1 - (1 - .5)^2 = .75
    """

    name = "kseq"

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        # 1. The smallest ρ for the number of draws present.
        present = draws.tokens >= 0
        number = present.sum(-1, keepdim=True)
        q = q * scale(q, number > 0)
        rho = find_smallest_rho(p, q, number)
        both, beta = share_mass(p, q, rho)

        # 2. Each draw is reached if all draws before it are refused.
        token_index = draws.tokens.clamp(min=0)
        accept = (
            divide_probabilities(
                p.gather(1, token_index), q.gather(1, token_index) * rho.to(p.dtype)
            )
            * present
        )
        refused = (1 - accept).cumprod(-1)  # Pr(this draw and all before it are refused)
        reached = refused.roll(1, -1).index_fill(1, token_index.new_zeros(1), 1)
        accepted = accept * reached

        # 3. The residual is p minus the mass that the draws accept on average.
        accepted_factor = (1 - (1 - beta) ** number) / clamp_positive(beta)
        return plan_from_acceptance(
            p, subtract(p, both, accepted_factor.to(p.dtype)), draws.tokens, accepted
        )

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor:
        number = torch.full_like(q[:, :1], k, dtype=torch.int64)
        _, beta = share_mass(p, q, find_smallest_rho(p, q, number))
        return (1 - (1 - beta) ** number).squeeze(1).to(p.dtype)
