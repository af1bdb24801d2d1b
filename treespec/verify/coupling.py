"""Scores for K independent draws: the draw with the largest score has the best distribution x for p.

Lay the tokens on [0, 1] in ascending order of f = p/q, each on an interval of length q. A draw of q
is then a uniform position. The largest of K positions has density g(u) = K u^(K-1). So if a draw's
score is its position, the selected draw has distribution q times the mean of g over its token's interval. If
instead E[g(score)] is f at each token, that distribution is p.

A score is therefore exchanged, at random, for another position t. Scores stay uniform, so x is
known exactly. g grows along a token's interval [a, b) and crosses f at c:

      g |                   /         [a, c)  f > g: "over" mass, the token needs larger scores
      f |- - - - - - - - /- -         [c, b)  f < g: "under" mass, it needs smaller scores
        |            /
        +-----|------|-------|
              a      c       b

Over and under mass are matched in order from the boundary of H* outwards. H* is the prefix of
tokens with the least p(H) - q(H)^K; the optimal acceptance rate is 1 plus that difference. In H*
all over mass finds a match, and the unmatched under mass raises x above p. Beyond H* all under mass
finds a match, and the unmatched over mass is lost to the acceptance rate. This is the
inverse-transform martingale coupling of Jourdain and Margheriti (2020).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

MIN_COUPLED_MASS = 1e-300
NEWTON_STEPS = 5  # these find mass to 1e-14 for up to 64 draws


@dataclass(frozen=True)
class Coupling:
    """The coupling of M cells in ascending order of f, at B nodes, in float64.

    A cell is a token, or several tokens of nearly equal f.

    Attributes:
        draws: [B, 1] K, at least 1.
        edges: [B, M + 1] the ends of the cells' intervals.
        f: [B, M] p/q.
        switch: [B, M] c, the position at which g crosses f.
        over, under: [B, M + 1] cumulated masses, 0 at the boundary of H*.
        density: [B, M] x/q.
    """

    draws: Tensor
    edges: Tensor
    f: Tensor
    switch: Tensor
    over: Tensor
    under: Tensor
    density: Tensor


def couple(p: Tensor, q: Tensor, draws: Tensor) -> Coupling:
    """Compute the coupling of p and q (Jourdain and Margheriti 2020).

    Args:
        p, q: [B, M] masses of the cells in ascending order of p/q; q sums to 1, p to at most 1.
        draws: [B, 1] number of independent draws, at least 1.
    """
    # 1. The cells' intervals, and the boundary of H*.
    draws = draws.to(q.dtype)
    safe = q.clamp(min=MIN_COUPLED_MASS)
    f = p / safe
    edges, below = _accumulate(torch.stack([q, p]))
    power = edges**draws
    start = edges[:, :-1]
    end = edges[:, 1:]
    low = power[:, :-1]
    high = power[:, 1:]
    boundary = (below - power).argmin(-1, keepdim=True)

    # 2. Where f = g. For one draw g is 1 everywhere, and the crossing is 0, 1 or infinite.
    share = f / draws
    crossing = share ** (1 / (draws - 1))
    switch = crossing.clamp(start, end)
    at_switch = (crossing * share).clamp(low, high)  # switch^K

    # 3. Over and under mass of each cell, cumulated from the boundary.
    over_mass = low.addcmul(f, switch - start) - at_switch
    under_mass = high.addcmul(f, switch - end) - at_switch
    masses = _accumulate(torch.stack([over_mass, under_mass]).clamp_(min=0))
    over, under = masses - masses.gather(-1, boundary.expand(2, -1, -1))

    # 4. x is p, plus the unmatched under mass, less the unmatched over mass.
    added = under.minimum(over[:, :1]).diff(dim=-1)
    lost = over.maximum(under[:, -1:]).diff(dim=-1)
    density = (p + added).sub_(lost).clamp_(min=0).div_(safe)
    return Coupling(draws, edges, f, switch, over, under, density)


def _accumulate(masses: Tensor) -> Tensor:
    """Return [..., M + 1] the sums of the first 0 to M masses [..., M]."""
    return pad(masses.cumsum(-1), (1, 0))


def score_draws(
    coupling: Coupling, cells: Tensor, position_in_cell: Tensor, coin: Tensor
) -> Tensor:
    """Return [B, K] the scores of K draws, positions in [0, 1].

    Args:
        coupling: of the B nodes.
        cells: [B, K] int64, the cell of each draw.
        position_in_cell: [B, K] uniform in [0, 1).
        coin: [B, K] uniform in [0, 1), decides whether the score is exchanged.
    """
    # 1. The positions.
    k = coupling.draws
    a = coupling.edges[:, :-1].gather(1, cells)
    b = coupling.edges[:, 1:].gather(1, cells)
    c = coupling.switch.gather(1, cells)
    f = coupling.f.gather(1, cells)
    s = a + position_in_cell * (b - a)

    # 2. The cumulated over or under mass up to each position s, and the position t matched with it.
    is_over = s < c
    edge = torch.where(is_over, a, c)
    mass = f * (s - edge) - (s**k - edge**k)  # over mass on [a, s], or -(under mass on [c, s])
    over = coupling.over.gather(1, cells) + mass
    under = coupling.under.gather(1, cells) - mass
    matched = torch.where(is_over, over <= coupling.under[:, -1:], under >= coupling.over[:, :1])
    t = _find_partner(coupling, is_over, torch.where(is_over, over, under))

    # 3. Exchange s for t with the probability that makes E[g(score)] = f.
    density_at_s = k * s ** (k - 1)
    density_at_t = k * t ** (k - 1)
    probability = (f - density_at_s).abs() / (density_at_t - density_at_s).abs().clamp(
        min=MIN_COUPLED_MASS
    )
    return torch.where(matched & (coin < probability), t, s)


def _find_partner(coupling: Coupling, is_over: Tensor, mass: Tensor) -> Tensor:
    """Return [B, K] the position t at which the cumulated mass of the other kind equals `mass` [B, K].

    is_over: [B, K] bool, whether `mass` is over mass; t then lies in under mass.

    phi(t) = t^K - f t is least at c. In the cell of t, with r the mass from c to t, t is the root
    of phi(t) - phi(c) = r on one side of c. Newton's method starts from the root of the parabola
    at c.
    """
    # 1. The cell of t, and the side of c.
    k = coupling.draws
    num_cells = coupling.f.shape[1]
    over = torch.searchsorted(coupling.over, mass, right=True).clamp_(1, num_cells).sub_(1)
    under = torch.searchsorted(coupling.under, mass, right=True).clamp_(1, num_cells).sub_(1)
    cell = torch.where(is_over, under, over)
    c = coupling.switch.gather(1, cell)
    f = coupling.f.gather(1, cell)
    cell_start = coupling.edges[:, :-1].gather(1, cell)
    cell_end = coupling.edges[:, 1:].gather(1, cell)
    low = torch.where(is_over, c, cell_start)
    high = torch.where(is_over, cell_end, c)

    # 2. The mass r between c and t.
    under_rest = mass - coupling.under.gather(1, cell)
    over_rest = coupling.over[:, 1:].gather(1, cell) - mass
    mass_from_crossing = torch.where(is_over, under_rest, over_rest).clamp_(min=0)

    # 3. The root.
    phi_at_crossing = c * (c ** (k - 1) - f)
    step = (
        2 * mass_from_crossing / (k * (k - 1) * c ** (k - 2)).clamp_(min=MIN_COUPLED_MASS)
    ).sqrt()
    t = (c + torch.where(is_over, step, -step)).clamp(low, high)
    mass_from_crossing += phi_at_crossing
    for _ in range(NEWTON_STEPS):
        power = t ** (k - 1)
        t = (t - (t * (power - f) - mass_from_crossing) / (k * power - f + MIN_COUPLED_MASS)).clamp(
            low, high
        )
    return t
