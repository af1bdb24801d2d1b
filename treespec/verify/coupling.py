"""Scores for independent draws of which the largest selects a token with the best law for p.

Tokens lie on [0, 1] in ascending order of f = p/q, each on an interval as long as its q. K
positions drawn uniformly have a maximum of density g(u) = K u^(K-1), so a score that is its own
position selects by g. It may be exchanged for another position t, and where it is in such a way
that E[g(score)] = f, the selected token's law is p:

    f > g ("over") on the left part [a, c) of a token's interval
    f < g ("under") on the right part [c, b)

over and under mass are matched in order, from the boundary of H* outwards, H* being the first
tokens with the least p(H) - q(H)^K (the optimal rate is 1 plus that). On H* all over mass finds a
match and what under mass does not adds to p; beyond it all under mass finds one and the over mass
that does not is lost. This is the inverse-transform martingale coupling of Jourdain and Margheriti
(2020); scores stay uniform, so that the selected token's law x is known exactly.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

TINY = 1e-300
NEWTON_STEPS = 5  # mass to 1e-14 for up to 64 draws


@dataclass(frozen=True)
class Coupling:
    """Of M cells in ascending order of f, for B nodes, in float64.

    draws: [B, 1] K >= 1. edges: [B, M + 1] ends of the cells. f: [B, M] p/q. switch: [B, M] c.
    over, under: [B, M + 1] cumulated masses, 0 at the boundary of H*. density: [B, M] x/q.
    """

    draws: Tensor
    edges: Tensor
    f: Tensor
    switch: Tensor
    over: Tensor
    under: Tensor
    density: Tensor


def couple(p: Tensor, q: Tensor, draws: Tensor) -> Coupling:
    """p, q: [B, M] masses of the cells, q sums to 1, p to at most 1.

    draws: [B, 1] independent draws, at least 1.
    """
    draws = draws.to(q.dtype)
    safe = q.clamp(min=TINY)
    f = p / safe
    edges, below = _cumulated(torch.stack([q, p]))
    power = edges**draws
    start, end, low, high = edges[:, :-1], edges[:, 1:], power[:, :-1], power[:, 1:]
    boundary = (below - power).argmin(-1, keepdim=True)
    share = f / draws
    crossing = share ** (
        1 / (draws - 1)
    )  # f = g; for one draw g is 1 everywhere, and this 0, 1 or infinite
    switch = crossing.clamp(start, end)
    at_switch = (crossing * share).clamp(low, high)  # switch^K
    above, short = (
        low.addcmul(f, switch - start) - at_switch,
        high.addcmul(f, switch - end) - at_switch,
    )
    masses = _cumulated(torch.stack([above, short]).clamp_(min=0))
    over, under = masses - masses.gather(-1, boundary.expand(2, -1, -1))
    added = under.minimum(over[:, :1]).diff(dim=-1)
    lost = over.maximum(under[:, -1:]).diff(dim=-1)
    return Coupling(
        draws, edges, f, switch, over, under, (p + added).sub_(lost).clamp_(min=0).div_(safe)
    )


def _cumulated(masses: Tensor) -> Tensor:
    """[..., M + 1] of the first 0 to M of [..., M]."""
    return pad(masses.cumsum(-1), (1, 0))


def scores(of: Coupling, cells: Tensor, place: Tensor, coin: Tensor) -> Tensor:
    """[B, K] the scores of draws that fell in the cells [B, K].

    place, coin: [B, K] uniform in [0, 1).
    """
    k = of.draws
    a, b, c, f = (x.gather(1, cells) for x in (of.edges[:, :-1], of.edges[:, 1:], of.switch, of.f))
    s = a + place * (b - a)
    is_over = s < c
    edge = torch.where(is_over, a, c)
    mass = f * (s - edge) - (
        s**k - edge**k
    )  # over mass on [a, s], or less the under mass on [c, s]
    over, under = of.over.gather(1, cells) + mass, of.under.gather(1, cells) - mass
    matched = torch.where(is_over, over <= of.under[:, -1:], under >= of.over[:, :1])
    t = _partner(of, is_over, torch.where(is_over, over, under))
    here, there = k * s ** (k - 1), k * t ** (k - 1)
    chance = (f - here).abs() / (there - here).abs().clamp(min=TINY)
    return torch.where(matched & (coin < chance), t, s)


def _partner(of: Coupling, is_over: Tensor, mass: Tensor) -> Tensor:
    """[B, K] where the cumulated mass of the other kind is `mass` [B, K]: under mass where this
    is_over [B, K].

    With phi(t) = t^K - f t, least at c, that is a root of phi(t) - phi(c) = r on one side of c: by
    Newton's method from the root of the parabola at c.
    """
    k, most = of.draws, of.f.shape[1]
    over, under = (
        torch.searchsorted(x, mass, right=True).clamp_(1, most).sub_(1) for x in (of.over, of.under)
    )
    cell = torch.where(is_over, under, over)
    c, f, left, right = (
        x.gather(1, cell) for x in (of.switch, of.f, of.edges[:, :-1], of.edges[:, 1:])
    )
    low, high = torch.where(is_over, c, left), torch.where(is_over, right, c)
    rest = torch.where(
        is_over, mass - of.under.gather(1, cell), of.over[:, 1:].gather(1, cell) - mass
    ).clamp_(min=0)
    least = c * (c ** (k - 1) - f)
    step = (2 * rest / (k * (k - 1) * c ** (k - 2)).clamp_(min=TINY)).sqrt()
    t = (c + torch.where(is_over, step, -step)).clamp(low, high)
    rest += least
    for _ in range(NEWTON_STEPS):
        power = t ** (k - 1)
        t = (t - (t * (power - f) - rest) / (k * power - f + TINY)).clamp(low, high)
    return t
