"""Recursive rejection sampling.

With replacement: Miao et al. 2024 (SpecInfer). Without: Jeon et al. 2024 (RSD), Yang et al. 2024,
Chen et al. 2024 (Sequoia), Li et al. 2024 (EAGLE-1).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from treespec.sampling.probs import sample_uniform
from treespec.trees.tree import Draws
from treespec.verify.distributions import (
    Independent,
    draw_iid_children,
    drop_repeats,
    keep_first,
    mask_out,
    normalize_residual,
    overlap,
    plan_recursive_rejection,
    select_most_likely,
)
from treespec.verify.scheme import Scheme

# Independent draws per wanted draw; four nearly always hold enough distinct tokens.
OVERSAMPLE_FACTOR = 4


def list_draw_distributions(q: Tensor, draws: int) -> list[Tensor]:
    """List the distribution [B, V] of each draw. q: [B, V] of one draft model, or [B, M, V] of M that take turns."""
    if q.dim() == 2:
        return [q] * draws
    models = q.unbind(1)
    return [models[draw % len(models)] for draw in range(draws)]


@final
@dataclass(frozen=True)
class RRS(Independent):
    """Independent draws, verified one after another as in single-draft speculative sampling.

    The first draw is verified against p. Each refused draw of distribution q replaces p by its residual
    norm (p - q)+, against which the next draw is verified. If all are refused, the output comes
    from the last residual. With several draft models this is SpecInfer's multi-step speculative sampling: q is the
    distribution of the model that made the draw. Five tokens; 2 and then 1 are drawn:

        q                   .1   .2   .3   .2   .2
        p                   .4   .3   .2   .1   0       draw 2 is accepted with 2/3
        norm (p - q)+       3/4  1/4  0    0    0       draw 1 with min(1, (1/4) / .2) = 1
        plan                0    1/3  2/3  0    0
    """

    name = "rrs"
    takes_several_models = True

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        qs = list_draw_distributions(q, draws.tokens.shape[1])
        return plan_recursive_rejection(p, qs, draws.tokens)

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor:
        all_refused = torch.ones_like(p[:, 0])
        residual = p
        for _ in range(k):
            all_refused = all_refused * (1 - overlap(residual, q))
            residual = normalize_residual((residual - q).clamp_(min=0), residual)
        return 1 - all_refused


def sample_without_replacement(q: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """Draw [B, width] distinct tokens, each from q [B, V] without the earlier draws; -1 if q has no more.

    Each token arrives after an exponential time of rate q, so the next to arrive is drawn by q.
    """
    arrivals = sample_uniform(q.shape, generator, q.device).log() / q  # [B, V] times, negative
    first = select_most_likely(arrivals, width)
    return first.masked_fill(~(q.gather(1, first.clamp(min=0)) > 0), -1)


def iterate_remaining_q(q: Tensor, tokens: Tensor) -> Iterator[Tensor]:
    """Yield the distribution of each of K draws [B, K]: q [B, V] without the earlier draws, not normalised.

    Draws 2 and 1 of five tokens:

        draw 2 from    .1  .2  .3  .2  .2
        draw 1 from    .1  .2  0   .2  .2
    """
    for token in tokens.split(1, dim=1):
        yield q
        q = mask_out(q, token)


@final
@dataclass(frozen=True)
class RRSWithoutReplacement(Scheme):
    """Distinct draws, each from q without the earlier draws, verified one after another.

    As in `rrs`, each refused draw replaces p by its residual; the distribution of a draw is q without the
    earlier draws. Independent draws without their repeats have the same distribution. So on a CPU
    `make` draws more independent tokens than it needs, and calls `sample_without_replacement` only for rows with too
    few distinct tokens. On other devices that test would cost a sync, so all rows use `sample_without_replacement`.
    """

    name = "rrs-wo"
    drawing = "without replacement"
    random_draws = "without replacement"

    def make(self, q: Tensor, width: int, number: Tensor, generator: torch.Generator) -> Draws:
        if q.device.type != "cpu":
            return Draws(keep_first(sample_without_replacement(q, width, generator), number))
        if width == 1:
            return Draws(keep_first(draw_iid_children(q, 1, generator), number))
        tokens = drop_repeats(draw_iid_children(q, OVERSAMPLE_FACTOR * width, generator))[:, :width]
        lacks_draws = ((tokens < 0) & (torch.arange(width, device="cpu") < number)).any(-1)
        if lacks_draws.any():
            raced = sample_without_replacement(
                mask_out(q[lacks_draws], tokens[lacks_draws]), width, generator
            )
            tokens[lacks_draws] = drop_repeats(torch.cat([tokens[lacks_draws], raced], dim=1))[
                :, :width
            ]
        return Draws(keep_first(tokens, number))

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        return plan_recursive_rejection(p, iterate_remaining_q(q, draws.tokens), draws.tokens)

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor | None:
        """Return [B] the overlap of q with p for one draw; None for more, because only enumeration gives that rate."""
        if k > 1:
            return None
        return overlap(p, q)
