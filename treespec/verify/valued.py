"""A scheme for draws of unequal value: a subtree below an earlier draw is worth more.

The goal is the largest sum over k of value_k Pr(draw k is accepted). That is a transport problem,
whose dual puts a price on each token: select the draw with the largest value_k - price(x_k), if it
is positive. Prices are found approximately, and each draw's score gets noise on a grid. So the law
of the selected draw is known exactly, whatever the prices, and the scheme is lossless.
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
from treespec.verify.scheme import Chance, Scheme

LEVELS = 48  # from 0 to the largest value; a level is the unit of prices and the noise's scale
ABOVE = 4  # levels above the largest value, where the noise ends
FINE, OCTAVE, LOWEST = 512, 32, -8  # fine cells of p/q, those of an octave, the log2 of the first
CELLS = 128  # cells of about equal mass of q, made of fine cells
STEPS = 40  # steps of the search for prices
HEAT, HOLD = 12.0, 0.4  # its noise falls from HEAT levels to 1 and stays for this share of steps
MOMENTUM = 0.8  # of a price that keeps its direction
MOST = 1000  # tokens: the largest value of a draw
PRECISION = 1 << 10  # rounding of prices, a level; coarser than sums in another order differ


@final
@dataclass(frozen=True)
class Valued(Scheme):
    """Independent draws; a score selects one, which is accepted as far as p allows.

    This scheme is treespec's own. It is lossless for any values.
    values: one for each draw in order, 1 + the accepted tokens expected below it. None is above the
    one before; the last one holds for all further draws.
    extra: 1: make draws until k distinct tokens are expected, because a repeat takes no
    node. The first k draws are then distinct or absent, and `Draws.places` keeps the order of
    drawing. 0: make k draws.
    Raises InputError for an option out of its range.
    """

    name: ClassVar[str] = "valued"
    chance: ClassVar[Chance | None] = "independent"

    values: tuple[float, ...] = (2.0, 1.5, 1.0)
    extra: int = 0

    def __post_init__(self) -> None:
        falling = all(
            a >= b >= 0 for a, b in zip(self.values, (*self.values[1:], 0.0), strict=True)
        )
        if not (self.values and falling and 0 < self.values[0] <= MOST):
            raise InputError(
                f"verifier valued: values are {'/'.join(map(str, self.values))}; the first must be "
                f"positive, at most {MOST}, and none above the one before, such as 2/1.5/1"
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
        # 1. The draws in the order of drawing, and their values.
        check(self, q, 1)
        tokens = draws.tokens
        if draws.places is not None:
            tokens = tokens.gather(1, draws.places.argsort(dim=-1))
        present = tokens >= 0
        q = q * scale(q, present.any(-1, keepdim=True))
        value = self.levels(q, tokens.shape[1])

        # 2. Pr(each draw is selected), by the scores of its token's cell.
        cell, price, density = select(p, q, value, present)
        at = tokens.clamp(min=0)
        cell_of_draw = cell.gather(1, at)
        cdf = scores(price.gather(1, cell_of_draw))
        chosen = (steps(cdf) * best(cdf, value, present)).sum(-1)

        # 3. The share of it that p accepts: x [B, K, K] is the mass of draw k at each drawn token.
        columns = cell_of_draw[:, None].expand(-1, tokens.shape[1], -1)
        x = density.gather(2, columns) * q.gather(1, at)[:, None]
        kept = shares(p.gather(1, at)[:, None], x).diagonal(dim1=1, dim2=2)

        # 4. The residual is p less the law of the selected token.
        law = q * density.sum(1).to(q.dtype).gather(1, cell)
        rest = subtract(p, law, torch.ones_like(p[:, :1]))
        return answer(p, rest, tokens, (chosen * kept).to(p.dtype))

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> None:
        """None: the residual may return a draw that was not selected."""
        check(self, q, 1)

    def accepted(self, p: Tensor, q: Tensor, k: int) -> Tensor:
        """[B, K] Pr(the draw is selected and accepted), for k draws.

        The output is a draw more often than that, because the residual may return one.
        """
        q = q * scale(q, torch.ones_like(q[:, :1]))
        present = torch.ones(len(q), k, dtype=torch.bool, device=q.device)
        cell, _, density = select(p, q, self.levels(q, k), present)
        x = q[:, None] * density.gather(2, cell[:, None].expand(-1, k, -1))
        return (x * shares(p[:, None], x)).sum(-1)

    def levels(self, q: Tensor, k: int) -> Tensor:
        """[B, K] int64 the values of k draws as levels.

        With `extra` a draw has the value of its expected rank among the distinct tokens.
        """
        all_values = (*self.values, *self.values[-1:] * k)
        values = torch.tensor(all_values, dtype=torch.float64, device=q.device)
        rank = torch.arange(k, dtype=torch.float64, device=q.device).expand(len(q), -1)
        if self.extra:
            likely = q.gather(1, likeliest(q, min(LIKELY, q.shape[-1])))[..., None].double()
            unlikely = (1 - likely.sum(1)).clamp(min=0)
            rank = (1 - (1 - likely) ** rank[:, None]).sum(1) + unlikely * rank
        lower = rank.long()
        value = values[lower].lerp(values[lower + 1], rank - lower)
        return (value * (LEVELS / self.values[0])).round().long()


def arranged(tokens: Tensor) -> Draws:
    """The draws [B, K] with distinct tokens first, then absent draws, then repeats.

    `places` keeps the column that each had. Five draws, a dot for an absent one:

        drawn     7 3 7 5 .        tokens    7 3 5 . 7        places    0 1 3 4 2
    """
    repeats = (tokens[:, :, None] == tokens[:, None]).tril(-1).any(-1)
    order = (2 * repeats).masked_fill(tokens < 0, 1).argsort(dim=-1, stable=True)
    return Draws(tokens.gather(1, order), places=order)


def select(p: Tensor, q: Tensor, value: Tensor, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, V] each token's cell, [B, C] prices, and [B, K, C] Pr(draw k is selected | its cell).

    q: sums to 1. value: [B, K] levels. present: [B, K] bool.
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
    """[B, C] float64 the cells' prices, in levels.

    A price rises where more than p is selected, and falls, down to 0, where less is. These are
    steps of Sinkhorn's algorithm while the noise cools down, with momentum where a price keeps its
    direction. p, q: [B, C] masses.
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
    """[B, V] int64 the cell of each token: nearly equal p/q, and about equal mass of q a cell.

    Up to `CELLS` tokens have a cell each. q: sums to 1.
    """
    if q.shape[1] <= CELLS:
        return torch.arange(q.shape[1], device=q.device).expand_as(q)
    octaves = (p / q).log2() - LOWEST
    fine = (octaves * OCTAVE).nan_to_num(0).clamp_(0, FINE - 1).long()  # 0/0 is never drawn
    mass = torch.zeros(len(q), FINE, dtype=torch.float64, device=q.device)
    mass.scatter_add_(1, fine, q.double())
    middle = mass.cumsum(-1) - mass / 2
    return (middle * CELLS).long().clamp_(0, CELLS - 1).gather(1, fine)


def scores(price: Tensor, heat: float = 1.0) -> Tensor:
    """[..., T] Pr(score <= value + t) for t from -LEVELS to ABOVE.

    The score has a logistic law about value - price, on the grid of levels. heat: its scale.
    """
    t = torch.arange(-LEVELS, ABOVE + 1, dtype=price.dtype, device=price.device)
    cdf = ((-price / heat).exp()[..., None] * (-(t + 0.5) / heat).exp()).add_(1).reciprocal_()
    cdf[..., -1] = 1
    return cdf


def steps(cdf: Tensor) -> Tensor:
    """[..., T] the mass at each level of a cumulated law [..., T]."""
    return cdf.diff(dim=-1, prepend=torch.zeros_like(cdf[..., :1]))


def expected(cdf: Tensor, q: Tensor, present: Tensor) -> Tensor:
    """[B, K, T] the cumulated law of a draw's score, over its cell. cdf: [B, C, T]. q: [B, C]."""
    return (q[:, None] @ cdf).expand(-1, present.shape[1], -1)


def best(cdf: Tensor, value: Tensor, present: Tensor) -> Tensor:
    """[B, K, T] Pr(draw k is selected | its score is value_k + t).

    A draw is selected if its score is above 0, above the scores of earlier draws and not below
    those of later draws.
    cdf: [B, K, T] of the scores less their values. value: [B, K] levels. present: [B, K] bool.
    """
    # 1. Pr(score <= level) and Pr(score < level) of each draw, for each level above 0.
    cdf = cdf.masked_fill(~present[..., None], 1)
    level = torch.arange(1, LEVELS + ABOVE + 1, device=cdf.device)
    place = level - value[..., None] + LEVELS  # [B, K, level]
    last = cdf.shape[-1] - 1
    upto, below = (cdf.gather(2, at.clamp(0, last)) for at in (place, place - 1))

    # 2. All earlier draws lie below the level, all later ones not above it. No draw wins at 0.
    before = pad(below[:, :-1], (0, 0, 1, 0), value=1).cumprod(1)
    after = pad(upto[:, 1:], (0, 0, 0, 1), value=1).flip(1).cumprod(1).flip(1)
    wins = pad(before * after * present[..., None], (1, ABOVE))

    # 3. From levels to t.
    at = torch.arange(last + 1, device=cdf.device) - LEVELS + value[..., None]
    return wins.gather(2, at.clamp(0, wins.shape[2] - 1))


def shares(p: Tensor, x: Tensor) -> Tensor:
    """[B, K, ...] the accepted share of x [B, K, ...]: p [B, 1, ...] pays for draws in order."""
    left = (p - x.cumsum(1) + x).clamp(min=0)
    return (left / x.clamp(min=torch.finfo(x.dtype).tiny)).clamp(max=1)
