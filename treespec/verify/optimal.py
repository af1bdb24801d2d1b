"""A scheme that reaches the optimal acceptance rate α* of its draws, for any number of draws.

A node takes a few of the most likely tokens for sure and makes independent draws from the rest of q. Each
draw gets a score, and the largest score selects one draw. The distribution of the selected draw is known
exactly (`coupling`), so it is verified as a single draft of that distribution.

Global Resolution (Thomas and Pal 2025, 2511.15898) solves the transport of K draws from one distribution by
a convex minimisation in at most V variables, to any accuracy. The coupling here has a closed form
and reaches α* without iteration.
"""

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from treespec.sampling.probs import sample_uniform
from treespec.trees.static import build_level_tree
from treespec.trees.tree import Draws
from treespec.verify.coupling import MIN_COUPLED_MASS, Coupling, couple, score_draws
from treespec.verify.distributions import (
    draw_iid_children,
    keep_first,
    mask_out,
    overlap,
    plan_single_draft,
    scale,
    select_most_likely,
    sum_mass_on,
)
from treespec.verify.scheme import Scheme

# Cells of nearly equal p/q: 64 an octave from 2^-8 to 2^6, each at most 1.6 % wide. They are the
# upper bits of p/q as a float32.
RATIO_BIT_SHIFT = 17
LOWEST_RATIO_CELL = (127 - 8) << 6
NUM_RATIO_CELLS = 14 << 6
MAX_DRAW_FACTOR = 4  # limit on independent draws, in multiples of the draws asked for
# Tokens that count in the expected number of distinct draws; all others are unlikely.
LIKELY_TOKENS = 64


class Allotment(NamedTuple):
    """How a node's draws are made, decided from q before any draw.

    Attributes:
        certain: [B, width] int64 the sure tokens, -1 beyond.
        number: [B, 1] number of independent draws.
        rest: [B, V] q without the sure tokens, not normalised; the draws come from it.
    """

    certain: Tensor
    number: Tensor
    rest: Tensor


class SelectedDraw(NamedTuple):
    """The draw that is verified, as a single draft of its own distribution.

    Attributes:
        distribution: [B, V] of the selected draw.
        tokens: [B, K] all draws.
        chosen: [B, K] 1 in the selected draw's column.
    """

    distribution: Tensor
    tokens: Tensor
    chosen: Tensor


@final
@dataclass(frozen=True)
class Optimal(Scheme):
    """Sure tokens, then independent draws; a score selects one of the independent draws.

    The acceptance rate is α* of these draws if `exact`, else at most 0.1 percentage points less on
    a model's distributions. Both count draws that have no node in a tree.

    Draws are ordered: k distinct or absent draws first (only these get nodes), then repeats and further draws.
    All of them are verified.

    Args:
        threshold: the most likely token is taken for sure while its share of the rest of q is larger than
            this and another draw is to come. At 1 all draws are independent.
        extra: 1: make draws until k distinct tokens are expected, because a repeat takes no
            node. 0: make k draws.
        exact: 1: sort all tokens by p/q. 0: sort them into cells of nearly equal p/q, which is faster
            and also lossless.

    Raises:
        InputError: an option out of its range.
    """

    name = "optimal"
    random_draws = "independent"
    default_tree = build_level_tree(3, 1, 1, 1, 1)

    threshold: float = 0.35
    extra: int = 1
    exact: int = 0

    def make(self, q: Tensor, width: int, number: Tensor, generator: torch.Generator) -> Draws:
        # The sure tokens, then draws from the rest of q. Their number is fixed before drawing.
        allotment = self.split_certain_and_random(q, number, width)
        drawn = draw_iid_children(allotment.rest, self.count_max_iid_draws(width), generator)
        return self.arrange_draws(allotment.certain, keep_first(drawn, allotment.number), generator)

    def arrange_draws(self, certain: Tensor, drawn: Tensor, generator: torch.Generator) -> Draws:
        """Join sure tokens [B, K] and independent draws [B, M] into `Draws`, with uniform numbers for the scores."""
        tokens = torch.cat([certain, drawn], dim=1)
        b, k = tokens.shape
        uniforms = sample_uniform((b, k, 2), generator, tokens.device)
        is_sure = torch.arange(k, device=tokens.device) < certain.shape[1]
        sure = is_sure.expand_as(tokens)

        # Distinct tokens first, then absent ones, then repeats.
        repeats = (tokens[:, :, None] == tokens[:, None]).tril(-1).any(-1)
        order = (2 * repeats).masked_fill(tokens < 0, 1).argsort(dim=-1, stable=True)
        return Draws(tokens, sure, uniforms).select_columns(order)

    @property
    def drawing(self) -> str:
        options = self.threshold, self.extra
        if options == (1, 0):
            return "with replacement"
        if options == (0, 0):  # all but the last draw are sure
            return "greedy"
        if options == (Optimal.threshold, Optimal.extra):
            return "tops and tail"
        return f"tops and tail, threshold={self.threshold:g}, extra={self.extra}"

    def count_max_iid_draws(self, k: int) -> int:
        """Return the largest number of independent draws at a node of k draws."""
        if self.extra and k > 1:
            return MAX_DRAW_FACTOR * k
        return k

    def split_certain_and_random(self, q: Tensor, number: Tensor, width: int) -> Allotment:
        """Choose the sure tokens and the number of draws, from q alone before any draw is made.

        number: [B, 1] distinct tokens to expect, at most `width`. Three draws of five tokens, at the default
        threshold of 0.35 and without `extra`:

            q                 .5   .3   .1   .06  .04
            share of rest     .5   .6   .5            the last draw is never sure
            certain           0 1
            rest, number      0    0    .1   .06  .04      1 draw
        """
        if width == 1:
            has_mass = q.sum(-1, keepdim=True) > 0
            return Allotment(torch.full_like(number, -1), number * has_mass, q)

        # 1. Sure tokens: the most likely, while each has a large share of the rest of q. The last
        #    draw is independent, because a draw accepts more than a sure token.
        best = select_most_likely(q, width + LIKELY_TOKENS)
        share = q.gather(1, best.clamp(min=0)).double() * (best >= 0)
        total = q.sum(-1, keepdim=True, dtype=torch.float64)
        remaining = (total - share.cumsum(-1) + share).clamp_(min=0)
        not_last = torch.arange(best.shape[1], device=q.device) < number - 1
        sure = (
            ((share > self.threshold * remaining) & not_last & (self.threshold < 1))
            .cumprod(-1)
            .bool()
        )
        certain = best.masked_fill(~sure, -1)[:, :width]

        # 2. The rest of q, and the distinct draws to expect from it.
        rest = mask_out(q, certain)
        mass = rest.sum(-1, keepdim=True, dtype=torch.float64)
        number = (number - sure.sum(-1, keepdim=True)) * (mass > 0)
        if not self.extra:
            return Allotment(certain, number, rest)

        # 3. The smallest number of draws at which `number` distinct tokens are expected.
        likely = (share.masked_fill(sure, 0) * scale(mass, number > 0))[..., None]
        num_draws = torch.arange(1, self.count_max_iid_draws(width) + 1, device=q.device)
        distinct = (1 - (1 - likely) ** num_draws).sum(1) + (
            1 - likely.sum(1)
        ) * num_draws  # [B, most]
        needed = torch.maximum(number, (distinct < number).sum(-1, keepdim=True))
        return Allotment(certain, needed * (number > 0), rest)

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        draw = self.select_draw(p, q, draws)
        return plan_single_draft(p, draw.distribution, draw.tokens, draw.chosen)

    def select_draw(self, p: Tensor, q: Tensor, draws: Draws) -> SelectedDraw:
        """Select one of a node's draws, and compute the distribution that it then has."""
        # 1. Which draws are independent [B, K], and their distribution: q without the sure tokens.
        assert draws.sure is not None
        assert draws.uniforms is not None
        drawn = (draws.tokens >= 0) & ~draws.sure
        number = drawn.sum(-1, keepdim=True)
        q = mask_out(q, draws.tokens.masked_fill(drawn, -1))
        q = q * scale(q, number > 0)
        if self._has_one_draw(drawn, number):
            return SelectedDraw(q, draws.tokens, drawn.to(p.dtype))

        # 2. The draw with the largest score.
        cell, coupling = self.couple(p, q, number)
        cell_of_draw = cell.gather(1, draws.tokens.clamp(min=0))
        place, coin = draws.uniforms.unbind(-1)
        score = score_draws(coupling, cell_of_draw, place, coin)
        best_column = score.masked_fill(~drawn, -1).argmax(-1, keepdim=True)
        chosen = torch.zeros_like(score, dtype=p.dtype).scatter_(1, best_column, 1.0) * drawn
        return SelectedDraw(
            build_selected_distribution(q, number, cell, coupling), draws.tokens, chosen
        )

    def _has_one_draw(self, drawn: Tensor, number: Tensor) -> bool:
        """Whether no node has several independent draws. On an accelerator the answer may be False: it avoids a sync.

        drawn: [B, K] bool, which draws are independent. number: [B, 1] their number.
        """
        if drawn.shape[1] == 1:
            return True
        if self.threshold == 0 and not self.extra:  # all but the last draw are sure
            return True
        return drawn.device.type == "cpu" and int(number.max()) < 2

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor:
        asked = torch.full_like(q[:, :1], k, dtype=torch.int64)
        certain, number, rest = self.split_certain_and_random(q, asked, k)
        rest = rest.mul_(scale(rest, number > 0))
        cell, coupling = self.couple(p, rest, number)
        return sum_mass_on(p, certain) + overlap(
            p, build_selected_distribution(rest, number, cell, coupling)
        )

    def couple(self, p: Tensor, q: Tensor, number: Tensor) -> tuple[Tensor, Coupling]:
        """Return [B, V] int64 the cell of each token, and the coupling for `number` [B, 1] draws from q.

        Five tokens, a cell for each by its rank (`exact`), or cells of nearly equal p/q:

            token       0    1    2    3    4
            p/q         2    .5   1    .25  4
            rank        3    1    2    0    4
            cell        576  448  512  384  640     64 an octave
        """
        # 1. The cell of each token.
        if self.exact:
            by_ratio = (p / q).argsort(-1)  # 0 / 0 and tokens that are never drawn come last
            cell = by_ratio.argsort(-1)
            cells = q.shape[-1]
        else:
            bits = (p / q).float().view(torch.int32)
            cell = (
                bits.bitwise_right_shift_(RATIO_BIT_SHIFT)
                .sub_(LOWEST_RATIO_CELL)
                .clamp_(0, NUM_RATIO_CELLS - 1)
                .long()
            )
            cells = NUM_RATIO_CELLS

        # 2. The cells' masses. q in float64: a float32 sum of many equal masses drifts by up to
        #    3e-4, and the scores would not follow x.
        mass_p = sum_cells(p, cell, cells).double()
        mass_q = sum_cells(q.double(), cell, cells)
        mass_q = mass_q / mass_q.sum(-1, keepdim=True).clamp(min=MIN_COUPLED_MASS)

        # 3. Their coupling. No distribution x of a selected draw exceeds K q.
        number = number.clamp(min=1)
        return cell, couple(mass_p.minimum(number * mass_q), mass_q, number)


def sum_cells(masses: Tensor, cell: Tensor, cells: int) -> Tensor:
    """Return [B, cells] the mass in each cell. masses: [B, V] of tokens. cell: [B, V] int64 of each token."""
    return masses.new_zeros(len(masses), cells).scatter_add_(1, cell, masses)


def build_selected_distribution(
    q: Tensor, number: Tensor, cell: Tensor, coupling: Coupling
) -> Tensor:
    """Return [B, V] the distribution x of the selected draw, 0 for a node without draws.

    Args:
        q: [B, V] the distribution of each independent draw.
        number: [B, 1] independent draws.
        cell: [B, V] int64 of each token.
        coupling: of the cells.
    """
    return q * (coupling.density * (number > 0)).to(q.dtype).gather(1, cell)
