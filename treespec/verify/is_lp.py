"""Importance sampling by a linear program (Khisti et al. 2025, Multi-Draft Speculative Sampling).

A linear program decides how one of two draws is selected, so that the selected token's distribution is as
close to p as it can be. The selected token is verified as a single draft of that distribution.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.trees.static import build_balanced_tree
from treespec.trees.tree import Draws
from treespec.verify.distributions import (
    Independent,
    divide_probabilities,
    normalize_residual,
    overlap,
    plan_single_draft,
)


@dataclass(frozen=True)
class PairRule:
    """How one of two draws is selected, by the ranks of their tokens.

    Attributes:
        selected: [B, V] probabilities of the selected token.
        order: [B, V] int64, the tokens by rank.
        wins: [B, s, s] Pr(rank i is selected from the draws of ranks i and j), 1 on the diagonal. If
            a rank is s or more, the lower rank wins.
        pairs: [B, s, s] Pr(the draws are ranks i and j, in any order), 0 on the diagonal.
    """

    selected: Tensor
    order: Tensor
    wins: Tensor
    pairs: Tensor

    def compute_win_probability(self, tokens: Tensor, rival: Tensor) -> Tensor:
        """Return [B, K] Pr(the token is selected over the rival). tokens: [B, K]. rival: [B, 1]."""
        s = self.wins.shape[-1]
        ranks = find_ranks(self.order, tokens)
        rivals = find_ranks(self.order, rival)
        decided = self.wins.flatten(1).gather(
            1, ranks.clamp(max=s - 1) * s + rivals.clamp(max=s - 1)
        )
        return torch.where(
            torch.maximum(ranks, rivals) < s, decided, (ranks <= rivals).to(decided.dtype)
        )


def find_ranks(order: Tensor, tokens: Tensor) -> Tensor:
    """Return [B, K] int64 the rank of each token [B, K]. order: [B, V] the tokens by rank."""
    return (order[:, None] == tokens[..., None]).int().argmax(-1)


def solve_pair_rule(p: Tensor, q1: Tensor, q2: Tensor, s: int) -> PairRule:
    """Solve the truncated program for draws from q1 and q2 against p.

    Args:
        p, q1, q2: [B, V].
        s: ranks whose pairs the program decides. In all other pairs the lower rank wins.
    """
    # 1. Ranks, by Pr(both draws are the token) - p.
    order = argsort_ascending(q1 * q2 - p)
    p = p.gather(1, order)
    q1 = q1.gather(1, order)
    q2 = q2.gather(1, order)

    # 2. The distribution of the selected token if the lower rank always wins.
    later1 = q1.sum(-1, keepdim=True) - q1.cumsum(-1)
    later2 = q2.sum(-1, keepdim=True) - q2.cumsum(-1)
    selected = q1 * q2 + q1 * later2 + q2 * later1

    # 3. The program for the pairs of the first s ranks.
    s = min(s, p.shape[-1])
    pairs = q1[:, :s, None] * q2[:, None, :s]
    pairs = (pairs + pairs.mT) * (1 - torch.eye(s, dtype=p.dtype, device=p.device))
    fixed = (q1 * q2)[:, :s] + q1[:, :s] * later2[:, s - 1 : s] + q2[:, :s] * later1[:, s - 1 : s]
    wins = solve(p[:, :s] - fixed, pairs)
    selected[:, :s] = fixed + (wins * pairs).sum(-1)
    return PairRule(torch.empty_like(selected).scatter_(1, order, selected), order, wins, pairs)


def argsort_ascending(scores: Tensor) -> Tensor:
    """Return [B, V] int64 the tokens by ascending score. On a CPU NumPy takes a fifth of torch's time."""
    if scores.is_cpu:
        return torch.from_numpy(scores.numpy().argsort(-1))
    return scores.argsort(-1)


def solve(room: Tensor, pairs: Tensor) -> Tensor:
    """Divide the mass of each pair between its two tokens, so that the tokens' room is filled best.

    The program: maximise the sum of t_i, where t_i is at most room_i and at most the mass that
    token i receives from its pairs. By Hall's theorem t is feasible if, for every set S of tokens, the pairs with a
    token in S have at least the mass t(S). The difference is the slack of S. Three tokens with room .3 .1 .2, and
    pairs of mass .2, .1 and .1:

        pair        0 1   0 2   1 2
        mass        .2    .1    .1
        to token    0     0     1       t = .3 .1 0

    Args:
        room: [B, s] the mass of p that each token can still take.
        pairs: [B, s, s] masses of the pairs, symmetric.

    Returns: [B, s, s] token i's share of its pair with token j.
    """
    # 1. The sets with each token [s, 2^s], and the sets with only one token of each pair [P, 2^s].
    ranks = torch.arange(room.shape[-1], device=room.device)
    member = (torch.arange(1 << len(ranks), device=room.device) >> ranks[:, None]) % 2 == 1
    low, high = torch.triu_indices(len(ranks), len(ranks), 1, device=room.device)
    has_low = member[low]
    has_high = member[high]
    low_alone = has_low & ~has_high
    high_alone = has_high & ~has_low

    # 2. The slack of each set [B, 2^s] before any t.
    masses = pairs[:, low, high]  # [B, P]
    slack = masses @ (has_low | has_high).to(masses.dtype)

    # 3. Each token in turn takes as much as its sets allow.
    for sets_with_token, token_room in zip(member, room.clamp(min=0).split(1, dim=1), strict=True):
        token_mass = (
            slack.masked_fill(~sets_with_token, torch.inf)
            .amin(-1, keepdim=True)
            .minimum(token_room)
        )
        slack = slack - token_mass * sets_with_token

    # 4. Each pair in turn gives its lower rank as much as the sets that hold only the other rank allow.
    shares = torch.zeros_like(masses)
    for pair in range(len(low)):
        mass = masses[:, pair : pair + 1]
        won = slack.masked_fill(~high_alone[pair], torch.inf).amin(-1, keepdim=True).minimum(mass)
        slack = slack - torch.where(high_alone[pair], won, (mass - won) * low_alone[pair])
        shares[:, pair : pair + 1] = won.clamp(min=0) / mass

    # 5. As a matrix. The lower rank wins a pair without mass.
    wins = torch.ones_like(pairs).triu()
    wins[:, low, high] = shares.where(masses > 0, 1)
    wins[:, high, low] = 1 - wins[:, low, high]
    return wins


def select(p: Tensor, q: Tensor, tokens: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """Return [B, K] Pr(each draw is selected), and the distribution of the selected token [B, V].

    The token selected from the first draws meets the next draw, one duel after another.

    Args:
        p, q: [B, V].
        tokens: [B, K] independent draws, -1 for none.
        s: as for `solve_pair_rule`.
    """
    token_index = tokens.clamp(min=0)
    chosen = torch.zeros(tokens.shape, dtype=p.dtype, device=p.device)
    chosen[:, 0] = 1
    selected = q
    for k in range(1, tokens.shape[1]):
        rule = solve_pair_rule(p, selected, q, s)
        present = tokens[:, k : k + 1] >= 0
        kept = chosen[:, :k] * rule.compute_win_probability(
            token_index[:, :k], token_index[:, k : k + 1]
        ).where(present, 1)
        chosen[:, k] = (chosen[:, :k] - kept).sum(-1)
        chosen[:, :k] = kept
        selected = rule.selected.where(present, selected)
    return chosen * (tokens >= 0), selected


def compute_is_lp_acceptance(p: Tensor, q: Tensor, s: int) -> Tensor:
    """Return [B] Pr(output is one of two draws): the selected draw, or the other draw as a residual token."""
    # 1. The selected token is refused with `refused`; the output then comes from `residual`.
    rule = solve_pair_rule(p, q, q, s)
    refused = 1 - divide_probabilities(p, rule.selected)
    residual = normalize_residual((p - rule.selected).clamp_(min=0), p)
    refused = refused.gather(1, rule.order)
    residual = residual.gather(1, rule.order)
    q = q.gather(1, rule.order)

    # 2. Pr(a token loses to a draw that is refused), [B, V] by rank: the lower rank wins.
    residual_hit = 2 * q * pad((q * refused).cumsum(-1)[:, :-1], (1, 0))

    # 3. Among the first s ranks the program decides who wins.
    num_decided = rule.wins.shape[-1]
    residual_hit[:, :num_decided] = (rule.wins * rule.pairs * refused[:, :num_decided, None]).sum(1)
    return overlap(p, rule.selected) + (residual * residual_hit).sum(-1)


@final
@dataclass(frozen=True)
class IsLp(Independent):
    """Independent draws; a linear program selects one, verified as a single draft of its distribution.

    Of more than two draws, the token selected from the first ones meets the next draw. Of five tokens
    2 and 1 are drawn; x is the distribution of the selected token:

        q                   .1   .2   .3   .2   .2
        p                   .4   .3   .2   .1   0       each pair is won by the lower token
        x                   .19  .32  .33  .12  .04     selected 1, accepted with min(1, .3 / .32) = 15/16
        norm (p - x)+       1    0    0    0    0
        plan                1/16 15/16 0   0    0
        acceptance rate     .79

    Args:
        s: number of tokens whose pairs the program decides; all other pairs follow a fixed order. More
            tokens accept more; the time grows with 2^s.

    Raises:
        InputError: an option out of its range.
    """

    name = "is-lp"
    default_tree = build_balanced_tree(2, 3)

    s: int = 5

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        chosen, selected = select(p, q, draws.tokens, self.s)
        return plan_single_draft(p, selected, draws.tokens, chosen)

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor | None:
        """Return [B] the exact rate of one or two draws.

        None for more draws: the residual may return any draw that lost.
        """
        if k > 2:
            return None
        if k == 2:
            return compute_is_lp_acceptance(p, q, self.s)
        return overlap(p, q)
