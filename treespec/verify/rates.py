"""Acceptance rates: the optimum α* of a law of draws, and the measured rate of any scheme.

Draws send their mass to their own tokens, and token x takes p(x): by the smallest cut, the most
that any plan accepts is α* = min over sets H of p(H) + 1 - Q(H), Q(H) = Pr(all draws lie in H). For
the laws here the prefixes of descending q/p hold a best H (Hu et al. 2025, Towards Optimal
Multi-Draft Speculative Decoding). p may sum to less than 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.special import gammainccinv, gammaincinv
from torch import Tensor
from torch.nn.functional import pad

from treespec.trees.tree import Draws
from treespec.verify import greedy
from treespec.verify.laws import overlap, scale, without
from treespec.verify.optimal import Optimal
from treespec.verify.scheme import Drawing, Scheme

CHUNK = 10_000_000  # elements of a [rows, V] tensor at a time
LOST = 1e-12  # probability beyond either end of the quadrature


def prefixes(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Float64 p and q [B, W], by descending q/p; q normalised.

    W: tokens that the widest row of q supports.
    """
    p, q = p.double(), q.double()
    order = (q / p.clamp(min=torch.finfo(p.dtype).tiny)).argsort(-1, descending=True)
    order = order[:, : int((q > 0).sum(-1).max())]  # the others never lower the cut
    q = q * scale(q, torch.ones_like(q[:, :1]))
    return p.gather(1, order), q.gather(1, order)


def smallest_cut(p: Tensor, inside: Tensor) -> Tensor:
    """[B] min over prefixes of p(H) + 1 - Q(H).

    p: [B, W]; inside: [B, W] Q of each prefix, 0 for the empty one.
    """
    return pad(p.cumsum(-1) - inside, (1, 0)).amin(-1) + 1


def optimal_iid(p: Tensor, q: Tensor, k: int | Tensor) -> Tensor:
    """[B] α* of k independent draws from q: Q(H) = q(H)^k.

    p: [B, V], may sum to less than 1; q: [B, V]; k: [B].

    Rates of float64 work in p's dtype; 0 where there are no draws or q is empty.
    """
    masses, law = prefixes(p, q)
    number = torch.as_tensor(k, device=q.device).expand(len(q))
    best = smallest_cut(masses, law.cumsum(-1) ** number[:, None])
    return (best * (law.sum(-1) > 0) * (number > 0)).to(p.dtype)


def optimal_tops(p: Tensor, q: Tensor, k: int, tops: int) -> Tensor:
    """[B] α* of the `tops` likeliest tokens of q and k - tops independent draws from the rest of q,
    renormalised.

    p, q: [B, V]. p(tops) plus what the independent draws accept of the rest of p.
    """
    best = greedy.tops(q, torch.full_like(q[:, :1], tops), tops)
    tail = without(p, best)
    return (p - tail).sum(-1) + optimal_iid(tail, without(q, best), k - tops)


def optimal_without_replacement(p: Tensor, q: Tensor, k: int) -> Tensor:
    """[B] α* of k draws one after another, each from q without the earlier ones, renormalised.

    p, q: [B, V].

    To 1e-9. This is not conditional Poisson sampling, whose generating function overstates α*.
    """
    masses, law = prefixes(p, q)
    enough = (law > 0).sum(-1) > k
    everything = (masses * (law > 0)).sum(-1)  # fewer tokens: all are drawn
    inside = (
        law.cumsum(-1)
        if k == 1
        else two_inside(law)
        if k == 2
        else inside_by_clocks(law, k, enough)
    )
    return torch.where(enough, smallest_cut(masses, inside), everything).to(p.dtype)


def two_inside(q: Tensor) -> Tensor:
    """[B, W] Q of each prefix of q for two draws: the sum over a in H of q_a (q(H) - q_a) / (1 -
    q_a).
    """
    top = q.argmax(-1, keepdim=True)
    rest = without(q, top)
    held = rest.cumsum(-1)
    likely = (q - rest).cumsum(
        -1
    )  # the top token's mass where it is in H; alone, as 1 - q_a cancels there
    odds = rest / (1 - rest)
    first = likely * held * scale(rest, torch.ones_like(likely[:, :1]))
    return first + (likely + held) * odds.cumsum(-1) - (odds * rest).cumsum(-1)


def inside_by_clocks(q: Tensor, k: int, enough: Tensor) -> Tensor:
    """[B, W] Q of each prefix of q for k draws, where q supports enough of them [B].

    Token z rings at an exponential time of rate q_z; the draws are the first k to ring. With y_z =
    e^(q_z t) - 1, Q(H) is the integral over t of e^-t W_k, W_j(H) = sum over a in H of q_a
    e_(j-1)(y of H without a), e_j the elementary symmetric polynomials. Trapezoid rule in log t:
    the integrand is analytic and dies off at both ends. The k-th ring is later than a Gamma(k)
    time, as all rates sum to 1, and earlier than a Gamma(k) time over what is left without the k -
    1 likeliest.
    """
    left = without(q, q.topk(min(k - 1, q.shape[-1])).indices).sum(-1, keepdim=True)
    start = math.log(gammaincinv(k, LOST))
    span = math.log(gammainccinv(k, LOST)) - start - left.where(enough[:, None], 1.0).log()
    points = math.ceil(
        span.max().item() * (3 + k / 4)
    )  # steps of 1 / (3 + k / 4) err by |Γ(k + 2πi/step)| / Γ(k)
    step = span / points
    cap = min(40.0, 600 / k)  # y stays finite; a token beyond has rung, but for e^-cap
    inside = torch.zeros_like(q)
    for point in range(points + 1):
        t = (start + point * step).exp()
        due = q * t
        y = due.clamp(max=cap).expm1()
        last = due.masked_fill(due > cap, 0)
        symmetric, ringing = (
            torch.ones_like(q),
            torch.zeros_like(q),
        )  # e_j and t W_j of the prefix before a token
        for j in range(1, k + 1):
            ringing = (y * ringing + last * symmetric).cumsum(-1)
            if j < k:
                ringing = pad(ringing[:, :-1], (1, 0))
                symmetric = pad((y * symmetric).cumsum(-1)[:, :-1], (1, 0))
        inside += ringing * (step * (-due.clamp(max=cap).sum(-1, keepdim=True)).exp())
    return inside


def tops_and_tail(p: Tensor, q: Tensor, k: int) -> Tensor:
    """[B] α* of the draws of `optimal`: sure tokens, then independent draws until k distinct tokens
    are expected.
    """
    tops, number, rest = Optimal().allot(q, torch.full_like(q[:, :1], k, dtype=torch.int64), k)
    tail = without(p, tops)
    return (p - tail).sum(-1) + optimal_iid(tail, rest, number.squeeze(1))


OPTIMA: dict[
    Drawing, Callable[[Tensor, Tensor, int], Tensor]
] = {  # [B] α* of k draws, by how they are drawn
    "with replacement": optimal_iid,
    "without replacement": optimal_without_replacement,
    "greedy": lambda p, q, k: optimal_tops(p, q, k, k - 1),
    "tops and tail": tops_and_tail,
}


@dataclass(frozen=True)
class Rate:
    """Acceptance rates [B] and their standard errors [B], 0 where exact."""

    value: Tensor
    error: Tensor


def measured(
    scheme: Scheme, p: Tensor, q: Tensor, k: int, generator: torch.Generator, samples: int = 64
) -> Rate:
    """Pr(output is one of k draws): exact where the scheme states it, else a mean over samples of
    draws.

    p: [B, V]; q: [B, V] or [B, K, V]. samples: of the draws at each row, at least 2. A sample is
    the plan's mass on its draws; no output is sampled. For draws without replacement that are
    accepted in turn, a control variate removes most of the remaining variance: see `without_luck`.
    """
    exact = scheme.acceptance_rate(p, q, k)
    if exact is not None:
        return Rate(exact, torch.zeros_like(exact))
    reduced = scheme.accepted_in_turn and scheme.drawing == "without replacement"
    estimate = stages if reduced else on_draws
    rows = torch.arange(len(p), device=p.device).repeat_interleave(samples)
    parts = [
        estimate(scheme, p[some], q[some], scheme.draw(q[some], k, generator))
        for some in rows.split(max(1, CHUNK // p.shape[-1]))
    ]
    found = torch.cat(parts, dim=-1).unflatten(-1, (len(p), samples))  # [..., B, samples]
    found = without_luck(*found) if reduced else found
    return Rate(found.mean(-1), found.std(-1) / math.sqrt(samples))


def on_draws(scheme: Scheme, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
    """[B] the plan's mass on the tokens drawn."""
    plan = scheme.plan(p, q, draws)
    return (plan - without(plan, draws.tokens)).sum(-1)


def stages(scheme: Scheme, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
    """[2, K, B] of rrs-wo: Pr(each draw is accepted), and the mean of that over the draw, given
    those before it.
    """
    accepted, expected = [], []
    rest = p  # mass not on draws: no draw's residual holds an earlier draw
    for number in range(draws.tokens.shape[1]):
        law = without(q, draws.tokens[:, :number])
        mass = rest.sum(-1, keepdim=True)
        expected.append(overlap(rest, law * scale(law, mass)))
        first = draws.tokens[:, : number + 1]
        rest = without(scheme.plan(p, q, Draws(first)), first)
        accepted.append(mass.squeeze(-1) - rest.sum(-1))
    return torch.stack([torch.stack(accepted), torch.stack(expected)])


def without_luck(accepted: Tensor, expected: Tensor) -> Tensor:
    """[B, samples] accepted mass less the luck of each draw; [K, B, samples] each.

    A control variate: luck, accepted - expected, has mean 0 given the draws before. Its coefficient
    is the share of that mass which no later draw would have accepted. The share is estimated from
    the other samples, so the estimate stays unbiased.
    """
    before = 1 - accepted.cumsum(0) + accepted  # Pr(refused by the draws before)
    refused, reached = (mass.sum(-1, keepdim=True) - mass for mass in (before - expected, before))
    refusal = (refused / reached.clamp(min=torch.finfo(reached.dtype).eps)).clamp(0, 1)
    later = torch.cat([refusal[1:], torch.ones_like(refusal[:1])])
    share = later.flip(0).cumprod(0).flip(0)
    return (accepted - share * (accepted - expected)).sum(0)
