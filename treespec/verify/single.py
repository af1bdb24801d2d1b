"""One sampled draw: as the only draw, or after the most likely tokens.

An only draw is verified by single-draft speculative sampling (Leviathan et al. 2023; Chen et al. 2023). After the
most likely tokens it is greedy multi-draft sampling (Hu et al. 2025, Towards Optimal Multi-Draft Speculative
Decoding).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.trees.static import build_chain
from treespec.trees.tree import Draws
from treespec.verify.distributions import (
    draw_iid_children,
    keep_first,
    mask_out,
    overlap,
    plan_single_draft,
    scale,
    select_top_tokens,
    sum_mass_on,
)
from treespec.verify.scheme import RandomDraws, Scheme


def find_last_draw(tokens: Tensor) -> Tensor:
    """Return [B, 1] the column of the sampled draw among the draws [B, K]: the last draw present."""
    return ((tokens >= 0).sum(-1, keepdim=True) - 1).clamp(min=0)


def compute_greedy_acceptance(p: Tensor, q: Tensor, best: Tensor) -> Tensor:
    """Return [B] the acceptance rate, p(best) + the overlap of p and q'. It is optimal for these draws.

    best: [B, K - 1] the most likely tokens. q' is q without them, normalised.
    """
    rest = mask_out(q, best)
    return sum_mass_on(p, best) + overlap(p, rest * scale(rest, torch.ones_like(p[:, :1])))


@dataclass(frozen=True)
class Greedy(Scheme):
    """The k - 1 most likely tokens, then one draw from q' = q without them, normalised.

    The last draw is verified as a single draft of distribution q'. The residual norm (p - q')+ includes the
    most likely tokens, so each of them is accepted with its own probability. For one draw this is
    `single`. If q supports fewer than k tokens, the last counts as sampled; q' is then one-hot, so the rule
    stays exact. Five tokens; 2 is the most likely, and 4 is drawn from q':

        q                   .1   .2   .3   .2   .2
        q'                  1/7  2/7  0    2/7  2/7
        p                   .4   .3   .2   .1   0       draw 4 is accepted with min(1, 0 / (2/7)) = 0
        (p - q')+           9/35 1/70 1/5  0    0
        plan                6/11 1/33 14/33 0   0
        acceptance rate     .2 + (1/7 + 2/7 + .1 + 0) = 51/70
    """

    name = "greedy"
    drawing: ClassVar[str] = "greedy"
    random_draws: ClassVar[RandomDraws] = "the last"

    def make(self, q: Tensor, width: int, number: Tensor, generator: torch.Generator) -> Draws:
        best = select_top_tokens(q, number - 1, width - 1)
        last = draw_iid_children(mask_out(q, best), 1, generator)
        tokens = pad(best, (0, 1), value=-1).scatter_(1, (number - 1).clamp(min=0), last)
        return Draws(keep_first(tokens, number))

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        last = find_last_draw(draws.tokens)
        rest = mask_out(q, draws.tokens.scatter(1, last, -1))
        return plan_single_draft(p, rest, draws.tokens.gather(1, last))

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor:
        return compute_greedy_acceptance(
            p, q, select_top_tokens(q, torch.full_like(q[:, :1], k - 1), k - 1)
        )


@dataclass(frozen=True)
class Single(Greedy):
    """One draw x ~ q, accepted with probability min(1, p(x)/q(x)).

    If it is refused, the output comes from the residual norm (p - q)+. The acceptance rate is
    the sum over x of min(p(x), q(x)), which is optimal for one draw. Five tokens, and the plan if token 2
    is drawn:

        p                   .4   .3   .2   .1   0
        q                   .1   .2   .3   .2   .2
        min(1, p/q)         1    1    2/3  1/2  0
        norm (p - q)+       3/4  1/4  0    0    0
        plan of draw 2      1/4  1/12 2/3  0    0       2/3 on the draw, 1/3 on the residual
        acceptance rate     .1 + .2 + .2 + .1 + 0 = .6
    """

    name = "single"
    drawing = "with replacement"
    random_draws = "independent"
    max_draws = 1
    default_tree = build_chain(5)
