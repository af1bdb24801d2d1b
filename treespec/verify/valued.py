"""A verifier for draws of unequal value: of child k's subtree more is expected than of child k +
1's.

To maximise the sum over k of value_k Pr(draw k is accepted) is a transport, whose dual puts a price
on each token: select the draw with the largest value_k - price(x_k), if that is positive. Prices
are found approximately, so each draw is scored with noise, on a grid. The law of what is selected
is then known exactly, whatever the prices.
"""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.errors import InputError
from treespec.trees.tree import Draws
from treespec.verify.laws import answer, check, counts, independent, likeliest, scale, subtract
from treespec.verify.optimal import LIKELY, Optimal
from treespec.verify.scheme import Scheme

LEVELS = (
    48  # from nothing to the largest value; one is the unit of prices and the scale of the noise
)
ABOVE = 4  # levels beyond, where the noise ends
FINE, OCTAVE, LOWEST = 512, 32, -8  # cells of p/q, how many an octave, and where they start
CELLS = 128  # made of those, of about equal mass of q
STEPS, HEAT, HOLD, MOMENTUM = (
    40,
    12.0,
    0.4,
    0.8,
)  # of the prices; noise from HEAT levels to 1, there for HOLD of steps
MOST = 1000  # a value, in tokens
PRECISION = 1 << 10  # of prices, a level; coarser than what sums in another order differ by


@final
@dataclass(frozen=True)
class Valued(Scheme):
    """Independent draws; selects one by its score and accepts it as far as p goes. treespec's own.

    values: of each draw in order, 1 + what its subtree is expected to bring; none above the one
    before, the last repeats. Lossless for any values. extra: draw until as many distinct tokens as
    asked for are expected, as a repeat takes no node; the first k draws are distinct or absent
    then, and `Draws.places` tells their order.
    """

    name: ClassVar[str] = "valued"

    values: tuple[float, ...] = (2.0, 1.5, 1.0)
    extra: int = 0

    def __post_init__(self) -> None:
        falling = all(
            a >= b >= 0 for a, b in zip(self.values, (*self.values[1:], 0.0), strict=True)
        )
        if not (self.values and falling and 0 < self.values[0] <= MOST):
            raise InputError(
                f"verifier valued: values are {'/'.join(map(str, self.values))}; the first must be positive, at most "
                f"{MOST}, and none above the one before, such as 2/1.5/1"
            )
        if self.extra not in (0, 1):
            raise InputError(f"verifier valued: extra is {self.extra}, must be 0 or 1")

    def draw(self, q: Tensor, k: int | Tensor, generator: torch.Generator) -> Draws:
        check(self, q, 1)
        if not self.extra:
            return independent(q, k, generator)
        width, number = counts(q, k)
        more = Optimal(threshold=1)
        tokens = independent(q, more.allot(q, number, width)[1].squeeze(1), generator).tokens
        tokens = pad(tokens, (0, max(0, width - tokens.shape[1])), value=-1)
        return arranged(tokens)

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        check(self, q, 1)
        tokens = (
            draws.tokens
            if draws.places is None
            else draws.tokens.gather(1, draws.places.argsort(dim=-1))
        )
        present = tokens >= 0
        q = q * scale(q, present.any(-1, keepdim=True))
        value = self.levels(q, tokens.shape[1])
        cell, price, density = select(p, q, value, present)
        at = tokens.clamp(min=0)
        own = cell.gather(1, at)
        cdf = scores(price.gather(1, own))
        chosen = (steps(cdf) * best(cdf, value, present)).sum(-1)
        x = (
            density.gather(2, own[:, None].expand(-1, own.shape[1], -1)) * q.gather(1, at)[:, None]
        )  # [B, K, token]
        kept = shares(p.gather(1, at)[:, None], x).diagonal(dim1=1, dim2=2)
        of_token = q * density.sum(1).to(q.dtype).gather(1, cell)
        return answer(
            p, subtract(p, of_token, torch.ones_like(p[:, :1])), tokens, (chosen * kept).to(p.dtype)
        )

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> None:
        """None: the residual may be one of the draws that were not selected."""
        check(self, q, 1)

    def accepted(self, p: Tensor, q: Tensor, k: int) -> Tensor:
        """[B, K] Pr(draw k is selected and accepted) of k draws; the output may also be a draw by
        chance.
        """
        q = q * scale(q, torch.ones_like(q[:, :1]))
        present = torch.ones(len(q), k, dtype=torch.bool, device=q.device)
        cell, _, density = select(p, q, self.levels(q, k), present)
        x = q[:, None] * density.gather(2, cell[:, None].expand(-1, k, -1))
        return (x * shares(p[:, None], x)).sum(-1)

    def levels(self, q: Tensor, k: int) -> Tensor:
        """[B, K] int64 the values of k draws as levels; with `extra` at their expected ranks among
        distinct tokens.
        """
        values = torch.tensor(
            (*self.values, *self.values[-1:] * k), dtype=torch.float64, device=q.device
        )
        rank = torch.arange(k, dtype=torch.float64, device=q.device).expand(len(q), -1)
        if self.extra:
            likely = q.gather(1, likeliest(q, min(LIKELY, q.shape[-1])))[..., None].double()
            rank = (1 - (1 - likely) ** rank[:, None]).sum(1) + (1 - likely.sum(1)).clamp(
                min=0
            ) * rank
        lower = rank.long()
        value = values[lower].lerp(values[lower + 1], rank - lower)
        return (value * (LEVELS / self.values[0])).round().long()


def arranged(tokens: Tensor) -> Draws:
    """[B, K] tokens as drawn: first the distinct, then the absent and repeats; `places` are theirs
    before.
    """
    repeats = (tokens[:, :, None] == tokens[:, None]).tril(-1).any(-1)
    order = (2 * repeats).masked_fill(tokens < 0, 1).argsort(dim=-1, stable=True)
    return Draws(tokens.gather(1, order), places=order)


def select(p: Tensor, q: Tensor, value: Tensor, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, V] the cell of each token, [B, C] prices, [B, K, C] Pr(draw k is selected | its cell).

    q: sums to 1.
    """
    cell = cells(p, q)
    mass = torch.zeros(2, len(q), min(CELLS, q.shape[1]), dtype=torch.float64, device=q.device)
    for part, law in zip(mass, (p, q), strict=True):
        part.scatter_add_(1, cell, law.double())
    mass_q = mass[1] * scale(mass[1], present.any(-1, keepdim=True))
    price = prices(mass[0], mass_q, value, present)
    cdf = scores(price)
    return cell, price, (steps(cdf) @ best(expected(cdf, mass_q, present), value, present).mT).mT


def prices(p: Tensor, q: Tensor, value: Tensor, present: Tensor) -> Tensor:
    """[B, C] float64 levels: raised where more than p is selected, and lowered where less, down to
    0.

    p, q: [B, C] masses. The steps of Sinkhorn's algorithm while the noise cools down, with momentum
    where they do not turn.
    """
    price, last = torch.zeros_like(p), torch.zeros_like(p)
    tiny = torch.finfo(p.dtype).eps
    for step in range(STEPS):
        heat = HEAT ** max(0.0, 1 - step / (STEPS * (1 - HOLD)))
        cdf = scores(price, heat)
        chance = best(expected(cdf, q, present), value, present).sum(1)
        x = q * cdf.mul_((chance - pad(chance[:, 1:], (0, 1)))[:, None]).sum(-1).clamp_(min=0)
        move = heat * ((x + tiny) / (p + tiny)).log()
        new = (price + move + MOMENTUM * last * (move * last > 0)).clamp_(0, LEVELS + 2 * ABOVE)
        price, last = new, new - price
    return (price * PRECISION).round() / PRECISION


def cells(p: Tensor, q: Tensor) -> Tensor:
    """[B, V] int64: tokens of nearly equal p/q together, about as much of q in each cell.

    q: sums to 1.

    A cell a token where that is enough.
    """
    if q.shape[1] <= CELLS:
        return torch.arange(q.shape[1], device=q.device).expand_as(q)
    fine = (
        (((p / q).log2() - LOWEST) * OCTAVE).nan_to_num(0).clamp_(0, FINE - 1).long()
    )  # 0 / 0 is never drawn
    mass = torch.zeros(len(q), FINE, dtype=torch.float64, device=q.device).scatter_add_(
        1, fine, q.double()
    )
    middle = mass.cumsum(-1) - mass / 2
    return (middle * CELLS).long().clamp_(0, CELLS - 1).gather(1, fine)


def scores(price: Tensor, heat: float = 1.0) -> Tensor:
    """[..., T] Pr(score <= value + t), t = -LEVELS ..

    ABOVE: a logistic law about value - price, on the grid.
    """
    t = torch.arange(-LEVELS, ABOVE + 1, dtype=price.dtype, device=price.device)
    cdf = ((-price / heat).exp()[..., None] * (-(t + 0.5) / heat).exp()).add_(1).reciprocal_()
    cdf[..., -1] = 1
    return cdf


def steps(cdf: Tensor) -> Tensor:
    """[..., T] the mass at each level."""
    return cdf.diff(dim=-1, prepend=torch.zeros_like(cdf[..., :1]))


def expected(cdf: Tensor, q: Tensor, present: Tensor) -> Tensor:
    """[B, K, T] over the cells of a draw, of mass q [B, C]. cdf: [B, C, T]."""
    return (q[:, None] @ cdf).expand(-1, present.shape[1], -1)


def best(cdf: Tensor, value: Tensor, present: Tensor) -> Tensor:
    """[B, K, T] Pr(draw k is selected | its score is value_k + t): above 0 and those before, not
    below those after.

    cdf: [B, K, T] of the scores less their values. value: [B, K] levels. present: [B, K] bool.
    """
    cdf = cdf.masked_fill(~present[..., None], 1)
    level = torch.arange(1, LEVELS + ABOVE + 1, device=cdf.device)
    place = level - value[..., None] + LEVELS  # [B, K, level]
    last = cdf.shape[-1] - 1
    upto, below = (cdf.gather(2, at.clamp(0, last)) for at in (place, place - 1))
    before = pad(below[:, :-1], (0, 0, 1, 0), value=1).cumprod(1)
    after = pad(upto[:, 1:], (0, 0, 0, 1), value=1).flip(1).cumprod(1).flip(1)
    wins = pad(
        before * after * present[..., None], (1, ABOVE)
    )  # score 0 and below; and none is as high
    at = torch.arange(last + 1, device=cdf.device) - LEVELS + value[..., None]
    return wins.gather(2, at.clamp(0, wins.shape[2] - 1))


def shares(p: Tensor, x: Tensor) -> Tensor:
    """[B, K, ...] what share of x [B, K, ...] is accepted: p [B, 1, ...] goes to the draws in
    order.
    """
    left = (p - x.cumsum(1) + x).clamp(min=0)
    return (left / x.clamp(min=torch.finfo(x.dtype).tiny)).clamp(max=1)
