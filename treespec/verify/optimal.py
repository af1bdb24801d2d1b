"""A verifier that reaches the optimal acceptance rate of its draws, for any number of them.

The likeliest tokens deterministically, then independent draws from the rest of q. Each of those
carries a score; the largest selects one, which is verified as a single draft of the exact law of
the selected (`coupling`).

Global Resolution (Thomas and Pal 2025, 2511.15898) solves the transport of K draws from one law by
a convex minimisation in at most V variables, to any accuracy. The coupling here is in closed form
and reaches α* as it stands.
"""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.trees.tree import Draws
from treespec.verify.coupling import TINY, Coupling, couple, scores
from treespec.verify.laws import (
    check,
    counts,
    independent,
    keep_first,
    likeliest,
    normalise,
    overlap,
    rejections,
    scale,
    single_draft,
    without,
)
from treespec.verify.partial import LayerScheme, partial_draft
from treespec.verify.scheme import Drawing, SureScheme

# Cells of p/q in a bucketed build: 64 an octave from 2^-8 to 2^6, each at most 1.6 % wide.
SHIFT, LOWEST, CELLS = 17, (127 - 8) << 6, 14 << 6
EXTRA = 4  # limit on independent draws, in multiples of the draws asked for
LIKELY = 64  # the expected number of distinct draws is computed from the likeliest tokens; the others are small


@final
@dataclass(frozen=True)
class Optimal(SureScheme, LayerScheme):
    """α* of the law of the draws, exactly where `exact`, else short of it by 0.1 points at most on
    a model's laws.

    threshold: the likeliest token is drawn for sure while it has more than this share of what is
    left of q and another draw is to come; at 1 all draws are independent. extra: draw until as many
    distinct tokens as asked for are expected, as a repeat takes no node. exact: sort all tokens by
    p/q; else they are put into cells of nearly equal p/q, which is as lossless. first: verify the
    first of the draws by itself, then the others against what it leaves; that accepts less in all
    and more on the first, below which a tree may be deeper. Of all K draws the first k are distinct
    or absent; the others, repeats and more than were expected, are verified like them.
    """

    name: ClassVar[str] = "optimal"
    accepted_in_turn: ClassVar[bool] = True

    threshold: float = 0.35
    extra: int = 1
    exact: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise InputError(
                f"optimal: threshold is {self.threshold}, must lie in (0, 1]; 1 is no token for sure"
            )
        if not {self.extra, self.exact, self.first} <= {0, 1}:
            raise InputError(
                f"optimal: extra is {self.extra}, exact {self.exact}, first {self.first}; each must be 0 or 1"
            )

    def draw(self, q: Tensor, k: int | Tensor, generator: torch.Generator) -> Draws:
        width, number = counts(q, k)
        check(self, q, width)
        tops, repeated, rest = self.allot(q, number, width)
        drawn = independent(rest, self.most(width), generator).tokens
        tokens = torch.cat([tops, keep_first(drawn, repeated)], dim=1)
        uniforms = torch.rand(
            (*tokens.shape, 2), generator=generator, dtype=torch.float64, device=q.device
        )
        sure = (torch.arange(tokens.shape[1], device=q.device) < tops.shape[1]).expand_as(tokens)
        repeats = (tokens[:, :, None] == tokens[:, None]).tril(-1).any(-1)
        order = (
            (2 * repeats).masked_fill(tokens < 0, 1).argsort(dim=-1, stable=True)
        )  # distinct, absent, repeats
        return Draws(tokens, sure, uniforms).columns(order)

    def draw_with_sure(
        self, q: Tensor, drawn: Tensor, sure: Tensor, generator: torch.Generator
    ) -> Draws:
        """`drawn` distinct draws are expected.

        Those have a node each; behind them stand the sure tokens.
        """
        # 1. The sure tokens, and draws from the rest of q.
        tops = keep_first(likeliest(q, int(sure.max())), sure[:, None].to(q.device))
        independent_only = Optimal(threshold=1, extra=self.extra)
        others = independent_only.draw(without(q, tops), drawn, generator)
        assert others.uniforms is not None

        # 2. The sure tokens between the draws that may have a node and those that have none.
        width = int(drawn.max())
        end = width + tops.shape[1]
        tokens = torch.cat([others.tokens[:, :width], tops, others.tokens[:, width:]], dim=1)
        unused = others.uniforms.new_zeros((*tops.shape, 2))
        uniforms = torch.cat(
            [others.uniforms[:, :width], unused, others.uniforms[:, width:]], dim=1
        )
        place = torch.arange(tokens.shape[1], device=q.device)
        is_sure = ((place >= width) & (place < end)).expand_as(tokens)

        # 3. Draws with a node, then absent ones, then draws without a node.
        beyond = (place >= drawn[:, None].to(q.device)) & ~is_sure
        order = (2 * beyond).masked_fill((tokens < 0) & ~beyond, 1).argsort(dim=-1, stable=True)
        return Draws(tokens, is_sure, uniforms).columns(order)

    @property
    def equal_draws(self) -> bool:
        return not self.first

    @property
    def drawing(self) -> Drawing | None:
        if self.threshold == 1 and not self.extra:
            return "with replacement"
        usual = (self.threshold, self.extra) == (Optimal.threshold, Optimal.extra)
        return "tops and tail" if usual else None

    def most(self, k: int) -> int:
        """Independent draws at a node of k draws, at most; settled on the host."""
        return EXTRA * k if self.extra else k

    def allot(self, q: Tensor, number: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """The sure tokens and the number of draws, fixed from q alone before any draw is made.

        number: [B, 1] distinct tokens to expect, at most `width`.
        Returns the sure tokens [B, width] with -1 beyond, the number of independent draws [B, 1],
        and the rest of q that those come from, [B, V], not normalised.
        """
        best = likeliest(q, width + LIKELY)
        share = q.gather(1, best.clamp(min=0)).double() * (best >= 0)
        left = (q.sum(-1, keepdim=True, dtype=torch.float64) - share.cumsum(-1) + share).clamp_(
            min=0
        )
        another = (
            torch.arange(best.shape[1], device=q.device) < number - 1
        )  # a draw accepts more than a sure token
        sure = ((share > self.threshold * left) & another & (self.threshold < 1)).cumprod(-1).bool()
        tops = best.masked_fill(~sure, -1)[:, :width]
        rest = without(q, tops)
        mass = rest.sum(-1, keepdim=True, dtype=torch.float64)
        number = (number - sure.sum(-1, keepdim=True)) * (mass > 0)
        if not self.extra:
            return tops, number, rest
        likely = (share.masked_fill(sure, 0) * scale(mass, number > 0))[..., None]
        times = torch.arange(1, self.most(width) + 1, device=q.device)
        distinct = (1 - (1 - likely) ** times).sum(1) + (1 - likely.sum(1)) * times  # [B, most]
        return (
            tops,
            torch.maximum(number, (distinct < number).sum(-1, keepdim=True)) * (number > 0),
            rest,
        )

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        q, drawn = self._sampled(q, draws)
        if not self.first:
            return single_draft(p, *self._selected(p, q, draws, drawn))
        lead = drawn & (drawn.cumsum(-1) == 1)
        token = draws.tokens.masked_fill(~lead, -1).amax(-1, keepdim=True)
        accepted, left = rejections(p, [q], token)
        left = normalise(left, p)
        rest = single_draft(left, *self._selected(left, q, draws, drawn & ~lead))
        return (rest * (1 - accepted)).scatter_add_(1, token.clamp(min=0), accepted)

    def partial(self, p: Tensor, q: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """For layer verification (`LayerScheme`), of which `first` is no part."""
        q, drawn = self._sampled(q, draws)
        law, tokens, chosen = self._selected(p, q, draws, drawn)
        return partial_draft(p, law, tokens, chosen > 0, (tokens >= 0) & ~drawn)

    def _sampled(self, q: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """[B, V] the law of the independent draws, and which of the draws they are, [B, K] bool."""
        check(self, q, draws.tokens.shape[1])
        assert draws.sure is not None
        drawn = (draws.tokens >= 0) & ~draws.sure
        rest = without(q, draws.tokens.masked_fill(drawn, -1))
        return rest.mul_(scale(rest, drawn.any(-1, keepdim=True))), drawn

    def _selected(
        self, p: Tensor, q: Tensor, draws: Draws, drawn: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The law [B, V] of the selected one of the draws from q [B, V], all tokens, and [B, K] 1
        for that one.
        """
        assert draws.uniforms is not None
        number = drawn.sum(-1, keepdim=True)
        cell, coupling = self.couple(p, q, number)
        score = scores(
            coupling, cell.gather(1, draws.tokens.clamp(min=0)), *draws.uniforms.unbind(-1)
        )
        best = score.masked_fill(~drawn, -1).argmax(-1, keepdim=True)
        chosen = torch.zeros_like(score, dtype=p.dtype).scatter_(1, best, 1.0) * drawn
        return selected_law(q, number, cell, coupling), draws.tokens, chosen

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor:
        check(self, q, k)
        tops, number, rest = self.allot(q, torch.full_like(q[:, :1], k, dtype=torch.int64), k)
        rest = rest.mul_(scale(rest, number > 0))
        chance = torch.zeros_like(p[:, 0])
        if self.first:
            chance = overlap(p, rest)
            p, number = normalise((p - rest).clamp_(min=0), p), (number - 1).clamp(min=0)
        law = selected_law(rest, number, *self.couple(p, rest, number))
        return chance + (1 - chance) * ((p - without(p, tops)).sum(-1) + overlap(p, law))

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
        # q in float64: a float32 sum of many equal masses drifts by up to 3e-4, and the scores would not follow x.
        mass_p, mass_q = (
            law.new_zeros(len(p), cells).scatter_add_(1, cell, law).double()
            for law in (p, q.double())
        )
        mass_q = mass_q / mass_q.sum(-1, keepdim=True).clamp(min=TINY)
        number = number.clamp(min=1)
        return cell, couple(
            mass_p.minimum(number * mass_q), mass_q, number
        )  # no x is more than K q


def selected_law(q: Tensor, number: Tensor, cell: Tensor, coupling: Coupling) -> Tensor:
    """[B, V] the law x of the selected draw, 0 where there is none."""
    return q * (coupling.density * (number > 0)).to(q.dtype).gather(1, cell)
