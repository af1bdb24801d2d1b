"""Acceptance rates: the optimum α* for a known kind of draws, and the rate of any scheme.

A plan is a flow: draws send mass to their own tokens, and token x takes at most p(x). The smallest
cut bounds the flow, so the best plan accepts

    α* = min over sets H of tokens of  p(H) + 1 - Q(H)      Q(H) = Pr(all draws lie in H)

For the draws below, a best H is a prefix of the tokens in descending q/p (Hu et al. 2025, Towards
Optimal Multi-Draft Speculative Decoding). p may sum to less than 1.
"""

import math
from collections.abc import Callable
from typing import cast

import torch
from scipy.special import gammainccinv, gammaincinv
from torch import Tensor
from torch.nn.functional import pad

from treespec.trees.tree import Draws
from treespec.verify.distributions import clamp_positive, mask_out, scale, sum_mass_on
from treespec.verify.optimal import Optimal
from treespec.verify.scheme import Scheme, check_width
from treespec.verify.single import Greedy
from treespec.verify.topk import TopK

CHUNK_ELEMENTS = 10_000_000  # elements of a tensor [rows, V] at a time
BOUND_PARTS = 16  # parts of the samples in `bound_optimum`
QUADRATURE_TAIL = 1e-12  # probability beyond each end of the quadrature


def sort_prefixes(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return p and q [B, W] in float64, with tokens in descending q/p; q is normalised.

    W is the largest number of tokens that a row of q supports. Other tokens never lower the cut.
    """
    p = p.double()
    q = q.double()
    order = (q / clamp_positive(p)).argsort(-1, descending=True)
    order = order[:, : int((q > 0).sum(-1).max())]
    q = q * scale(q, torch.ones_like(q[:, :1]))
    return p.gather(1, order), q.gather(1, order)


def find_smallest_cut(p: Tensor, inside: Tensor) -> Tensor:
    """Return [B] the minimum over prefixes H of p(H) + 1 - Q(H).

    p: [B, W]. inside: [B, W] Q(H) of each prefix but the empty prefix, which has Q 0.
    """
    return pad(p.cumsum(-1) - inside, (1, 0)).amin(-1) + 1


def compute_optimal_iid(p: Tensor, q: Tensor, k: int | Tensor) -> Tensor:
    """Return [B] α* of k independent draws from q: Q(H) = q(H)^k.

    Args:
        p: [B, V], each row with a sum of at most 1.
        q: [B, V].
        k: an int, or [B] int64.

    Returns: computed in float64, in p's dtype; 0 for a row without draws or without mass in q.
    """
    masses, drawn = sort_prefixes(p, q)
    number = torch.as_tensor(k, device=q.device).expand(len(q))
    best = find_smallest_cut(masses, drawn.cumsum(-1) ** number[:, None])
    return (best * (drawn.sum(-1) > 0) * (number > 0)).to(p.dtype)


def compute_optimal_without_replacement(p: Tensor, q: Tensor, k: int) -> Tensor:
    """Return [B] α* of k draws in turn, each from q without the earlier draws. p, q: [B, V].

    Exact to 1e-9. This is not conditional Poisson sampling, whose generating function overstates
    α*.
    """
    masses, drawn = sort_prefixes(p, q)
    enough = (drawn > 0).sum(-1) > k
    supported_mass = (masses * (drawn > 0)).sum(
        -1
    )  # α* if q supports at most k tokens, which are then all drawn
    inside = integrate_prefixes(drawn, k, enough)
    return torch.where(enough, find_smallest_cut(masses, inside), supported_mass).to(p.dtype)


def integrate_prefixes(q: Tensor, k: int, enough: Tensor) -> Tensor:
    """Compute [B, W] Q(H) of each prefix H of q [B, W], for k draws without replacement, by integration.

    enough: [B] bool, whether a row supports more than k tokens; other rows are not used.

    Each token z has a clock that rings after an exponential time of rate q_z. The draws are the
    first k tokens to ring. With y_z = e^(q_z t) - 1 and e_j the elementary symmetric polynomials,

        Q(H) = integral over t of e^-t W_k(H)
        W_j(H) = sum over a in H of q_a e_(j-1)(y of H without a)

    The integral is a trapezoid sum in log t: the integrand is analytic and falls off at both ends.
    All rates sum to 1, so the k-th ring comes later than a Gamma(k) time. It comes earlier than a
    Gamma(k) time divided by the mass of q without its k - 1 most likely tokens.
    """
    # 1. The interval of log t, and steps of 1 / (3 + k / 4), whose error is about
    #    |Γ(k + 2πi/step)| / Γ(k).
    tail_mass = mask_out(q, q.topk(min(k - 1, q.shape[-1])).indices).sum(-1, keepdim=True)
    start = math.log(gammaincinv(k, QUADRATURE_TAIL))
    span = (
        math.log(gammainccinv(k, QUADRATURE_TAIL))
        - start
        - tail_mass.where(enough[:, None], 1.0).log()
    )
    points = math.ceil(span.max().item() * (3 + k / 4))
    step = span / points
    cap = min(40.0, 600 / k)  # y stays finite; a token beyond has rung with probability 1 - e^-cap

    # 2. Add up the integrand.
    inside = torch.zeros_like(q)
    for point in range(points + 1):
        t = (start + point * step).exp()
        due = q * t
        y = due.clamp(max=cap).expm1()
        last = due.masked_fill(due > cap, 0)

        # 3. e_j and t W_j of the prefix before each token.
        symmetric = torch.ones_like(q)
        ringing = torch.zeros_like(q)
        for j in range(1, k + 1):
            ringing = (y * ringing + last * symmetric).cumsum(-1)
            if j < k:
                ringing = pad(ringing[:, :-1], (1, 0))
                symmetric = pad((y * symmetric).cumsum(-1)[:, :-1], (1, 0))
        inside += ringing * (step * (-due.clamp(max=cap).sum(-1, keepdim=True)).exp())
    return inside


def compute_optimal_tops_and_tail(
    p: Tensor, q: Tensor, k: int, scheme: Optimal | None = None
) -> Tensor:
    """Return [B] α* of the draws of `optimal`: sure tokens, and draws until k distinct are expected, or k draws.

    Args:
        p, q: [B, V].
        k: draws that were asked for.
        scheme: makes the draws. Default: `optimal` without options.
    """
    asked = torch.full_like(q[:, :1], k, dtype=torch.int64)
    if scheme is None:
        scheme = Optimal()
    certain, number, rest = scheme.split_certain_and_random(q, asked, k)
    return sum_mass_on(p, certain) + compute_optimal_iid(
        mask_out(p, certain), rest, number.squeeze(1)
    )


# [B] α* of k draws for p and q, by how the draws are made.
OPTIMA_BY_DRAWING: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "with replacement": compute_optimal_iid,
    "without replacement": compute_optimal_without_replacement,
    "greedy": Greedy().acceptance_rate,
    "most likely": TopK().acceptance_rate,
}


def find_optimum(scheme: Scheme, p: Tensor, q: Tensor, k: int) -> Tensor | None:
    """Return [B] α* of the k draws that a scheme makes; None if it is not known. p, q: [B, V]."""
    if scheme.drawing is None:
        return None
    kind, _, _ = scheme.drawing.partition(",")
    if kind == "tops and tail":
        return compute_optimal_tops_and_tail(p, q, k, cast(Optimal, scheme))
    if kind not in OPTIMA_BY_DRAWING:
        return None
    return OPTIMA_BY_DRAWING[kind](p, q, k)


def bound_optimum(
    scheme: Scheme, p: Tensor, q: Tensor, k: int, generator: torch.Generator, samples: int = 64
) -> Tensor:
    """Return [2, B] an estimate of a bound of α* for draws of any kind, and its standard error.

    For every set H of tokens no plan accepts more than p(H) + 1 - Q(H). H is a prefix of the tokens in descending
    q/p, chosen by all samples but a few, which then estimate Q(H). So no choice makes the estimate too low, and for
    the draws with a known α* it comes near to that.

    Args:
        scheme: makes the draws.
        p, q: [B, V].
        k: draws at each row.
        generator: of the samples.
        samples: samples of draws at each row, at least 2.
    """
    # 1. How many tokens a prefix needs to hold all draws, for each sample [B, S]; and p of the prefixes [B, V + 1].
    order = (q / clamp_positive(p)).argsort(-1, descending=True)
    places = order.argsort(-1) + 1
    needed_sizes = []
    for _ in range(samples):
        tokens = scheme.draw(q, k, generator).tokens
        drawn_places = places.gather(1, tokens.clamp(min=0)) * (tokens >= 0)
        needed_sizes.append(drawn_places.amax(-1))
    needed = torch.stack(needed_sizes, 1)
    prefix_mass = pad(p.double().gather(1, order).cumsum(-1), (1, 0))

    # 2. Each part of the samples estimates Q of the prefix that the others choose; the empty prefix costs 1.
    values = torch.ones_like(needed, dtype=torch.float64)
    for columns in torch.arange(samples, device=p.device).split(math.ceil(samples / BOUND_PARTS)):
        others = torch.ones(samples, dtype=torch.bool, device=p.device)
        others[columns] = False
        sizes = needed[:, others].sort(-1).values
        count = sizes.shape[1]
        held = torch.arange(1, count + 1, dtype=torch.float32, device=p.device) / count
        costs = pad(prefix_mass.gather(1, sizes) + 1 - held, (1, 0), value=1.0)
        chosen = pad(sizes, (1, 0)).gather(1, costs.argmin(-1, keepdim=True))
        values[:, columns] = prefix_mass.gather(1, chosen) + (needed[:, columns] > chosen).double()
    errors = values.std(-1) / math.sqrt(samples)
    return torch.stack([values.mean(-1), errors]).to(p.dtype)


def measure_rate(
    scheme: Scheme, p: Tensor, q: Tensor, k: int, generator: torch.Generator, samples: int = 64
) -> Tensor:
    """Return [2, B] Pr(output is one of k draws) and its standard error.

    If the scheme states the exact rate, that is the result, with error 0. Else it is a mean over samples of draws:
    the plan's mass on them. No output is sampled.

    Args:
        scheme: makes the draws, and plans.
        p, q: [B, V].
        k: draws at each row.
        generator: of the samples.
        samples: samples of draws at each row, at least 2.

    Raises:
        InputError: as `treespec.verify.scheme.check_width`.
    """
    # 1. The exact rate, if it is known.
    check_width(scheme, k)
    exact = scheme.acceptance_rate(p, q, k)
    if exact is not None:
        return torch.stack([exact, torch.zeros_like(exact)])

    # 2. Else samples of draws, a chunk of rows at a time.
    rows = torch.arange(len(p), device=p.device).repeat_interleave(samples)
    parts = []
    for chunk in rows.split(max(1, CHUNK_ELEMENTS // p.shape[-1])):
        draws = scheme.draw(q[chunk], k, generator)
        parts.append(sum_plan_on_draws(scheme, p[chunk], q[chunk], draws))
    accepted = torch.cat(parts).view(len(p), samples)
    return torch.stack([accepted.mean(-1), accepted.std(-1) / math.sqrt(samples)])


def sum_plan_on_draws(scheme: Scheme, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
    """Return [B] the plan's mass on the draws."""
    return sum_mass_on(scheme.plan(p, q, draws), draws.tokens)
