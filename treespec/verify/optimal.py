"""A verifier that reaches the optimal acceptance rate of its draws, for any number of them.

The likeliest tokens deterministically, then independent draws from the rest of q. Each of those carries a score; the
largest selects one, which is verified as a single draft of the exact law of the selected (`coupling`).
"""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.trees.tree import Draws
from treespec.verify.coupling import Coupling, couple, scores
from treespec.verify.laws import (
    check,
    counts,
    independent,
    keep_first,
    likeliest,
    overlap,
    scale,
    single_draft,
    without,
)

# Cells of p/q in a bucketed build: 128 an octave from 2^-8 to 2^6, each at most 0.8 % wide.
SHIFT, LOWEST, CELLS = 16, (127 - 8) << 7, 14 << 7
EXTRA = 4  # times as many independent draws as are asked for, at most
LIKELY = 64  # tokens of q that the expected number of distinct draws is reckoned from


@final
@dataclass(frozen=True)
class Optimal:
    """α* of the law of the draws, exactly where `exact`, else short of it by 0.1 points at most on a model's laws.

    threshold: the likeliest token is drawn for sure while it has more than this share of what is left of q and another
    draw is to come; at 1 all draws are independent. extra: draw until as many distinct tokens as asked for are
    expected, as a repeat takes no node. exact: sort all tokens by p/q; else they are put into cells of nearly equal
    p/q, which is as lossless.
    Draws.scores: [B, K, 2] uniforms, -1 for the tokens drawn for sure. Of all K draws the first k are distinct or
    absent; the others, repeats and more than were expected, are verified like them.
    """

    name: ClassVar[str] = "optimal"
    deterministic: ClassVar[bool] = False
    lossless: ClassVar[bool] = True
    max_draws: ClassVar[int | None] = None

    threshold: float = 0.35
    extra: int = 1
    exact: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise InputError(f"optimal: threshold is {self.threshold}, must lie in (0, 1]; 1 is no token for sure")
        if not {self.extra, self.exact} <= {0, 1}:
            raise InputError(f"optimal: extra is {self.extra}, exact {self.exact}; both must be 0 or 1")

    def draw(self, q: Tensor, k: int | Tensor, generator: torch.Generator) -> Draws:
        width, number = counts(q, k)
        check(self, q, width)
        tops, repeated = self.allot(q, number, width)
        drawn = independent(without(q, tops), self.most(width), generator).tokens
        tokens = torch.cat([tops, keep_first(drawn, repeated)], dim=1)
        uniform = torch.rand((*tokens.shape, 2), generator=generator, dtype=torch.float64, device=q.device)
        uniform[:, : tops.shape[1]] = -1
        repeats = (tokens[:, :, None] == tokens[:, None]).tril(-1).any(-1)
        order = (2 * repeats).masked_fill(tokens < 0, 1).argsort(dim=-1, stable=True)  # distinct, absent, repeats
        return Draws(tokens.gather(1, order), uniform.gather(1, order[..., None].expand_as(uniform)))

    def most(self, k: int) -> int:
        """Independent draws at a node of k draws, at most; settled on the host."""
        return EXTRA * k if self.extra else k

    def allot(self, q: Tensor, number: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """What is settled before drawing. number: [B, 1] distinct tokens to be expected, at most `width`.

        Returns the tokens drawn for sure, [B, width] with -1 beyond, and [B, 1] independent draws.
        """
        best = likeliest(q, width)
        share = q.gather(1, best.clamp(min=0)) * (best >= 0)
        left = share.sum(-1, keepdim=True) - share.cumsum(-1) + share + without(q, best).sum(-1, keepdim=True)
        sure = (share > self.threshold * left).cumprod(-1).bool() & (self.threshold < 1)
        sure &= torch.arange(width, device=q.device) < number - 1  # a draw accepts more than one more sure token
        tops = best.masked_fill(~sure, -1)
        rest = without(q, tops)
        number = (number - sure.sum(-1, keepdim=True)) * (rest.sum(-1, keepdim=True) > 0)
        if not self.extra:
            return tops, number
        rest = rest * scale(rest, number > 0)
        likely = rest.topk(min(LIKELY, q.shape[-1])).values[..., None]
        times = torch.arange(1, self.most(width) + 1, device=q.device)
        distinct = (1 - (1 - likely) ** times).sum(1) + (1 - likely.sum(1)) * times  # [B, most]
        return tops, torch.maximum(number, (distinct < number).sum(-1, keepdim=True)) * (number > 0)

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        check(self, q, draws.tokens.shape[1])
        assert draws.scores is not None
        place, coin = draws.scores.unbind(-1)
        drawn = (draws.tokens >= 0) & (place >= 0)
        number = drawn.sum(-1, keepdim=True)
        q = without(q, draws.tokens.masked_fill(drawn, -1))
        q = q.mul_(scale(q, number > 0))
        cell, coupling = self.couple(p, q, number)
        score = scores(coupling, cell.gather(1, draws.tokens.clamp(min=0)), place, coin)
        best = score.masked_fill(~drawn, -1).argmax(-1, keepdim=True)
        chosen = torch.zeros_like(place, dtype=p.dtype).scatter_(1, best, 1.0) * drawn
        return single_draft(p, selected_law(q, cell, coupling), draws.tokens, chosen)

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor:
        check(self, q, k)
        tops, number = self.allot(q, torch.full_like(q[:, :1], k, dtype=torch.int64), k)
        rest = without(q, tops)
        rest = rest.mul_(scale(rest, number > 0))
        return (p - without(p, tops)).sum(-1) + overlap(p, selected_law(rest, *self.couple(p, rest, number)))

    def couple(self, p: Tensor, q: Tensor, number: Tensor) -> tuple[Tensor, Coupling]:
        """[B, V] the cell of each token, and the coupling for `number` [B, 1] draws from q."""
        if self.exact:
            order = (p / q).argsort(-1)  # 0 / 0 and tokens that are never drawn come last
            ranks = torch.arange(q.shape[-1], device=q.device).expand_as(order)
            cell = torch.empty_like(order).scatter_(1, order, ranks)
            cells = q.shape[-1]
        else:
            bits = (p / q).float().view(torch.int32)
            cell = bits.bitwise_right_shift_(SHIFT).sub_(LOWEST).clamp_(0, CELLS - 1).long()
            cells = CELLS
        empty = torch.zeros(len(p), cells, dtype=torch.float64, device=p.device)
        # In float64: a float32 sum of many equal masses drifts by up to 3e-4, and the scores would not follow x.
        mass_p, mass_q = (empty.scatter_add(1, cell, law.double()) for law in (p, q))
        mass_q = mass_q * scale(mass_q, torch.ones_like(number))
        number = number.clamp(min=1)
        return cell, couple(mass_p.minimum(number * mass_q), mass_q, number)  # no x is more than K q


def selected_law(q: Tensor, cell: Tensor, coupling: Coupling) -> Tensor:
    """[B, V] the law x of the selected draw, 0 where there is none."""
    return q * coupling.density.to(q.dtype).gather(1, cell)
