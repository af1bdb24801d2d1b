"""Recursive rejection sampling without replacement.

Jeon et al. 2024 (RSD), Yang et al. 2024, Chen et al. 2024 (Sequoia), Li et al. 2024 (EAGLE-1).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from treespec.trees.tree import Draws
from treespec.verify.laws import (
    check,
    counts,
    distinct,
    independent,
    keep_first,
    likeliest,
    overlap,
    recursive_rejection,
    sample_if_any,
    without,
)
from treespec.verify.scheme import Drawing, SureScheme

SPARE = 4  # independent draws for one that is wanted


def laws_of(q: Tensor, tokens: Tensor) -> Iterator[Tensor]:
    """The [B, V] masses that each draw came from: q without the draws before it, not normalised."""
    for token in tokens.split(1, dim=1):
        yield q
        q = without(q, token)


@final
@dataclass(frozen=True)
class RRSWithoutReplacement(SureScheme):
    """Draws one after another, each from q without the earlier ones and verified against that law.

    Independent draws without their repeats are such draws; only where those run short q is searched
    again.

    Sure tokens stand behind the draws, which are then from q without them. Their laws are one-hot,
    so recursive rejection accepts each with its own share of what the draws leave of p.
    """

    name: ClassVar[str] = "rrs-wo"
    drawing: ClassVar[Drawing] = "without replacement"
    accepted_in_turn: ClassVar[bool] = True

    def draw(self, q: Tensor, k: int | Tensor, generator: torch.Generator) -> Draws:
        width, number = counts(q, k)
        check(self, q, width)
        if width == 1:
            return independent(q, k, generator)
        tokens = keep_first(
            distinct(independent(q, SPARE * width, generator).tokens)[:, :width], number
        )
        wanted = torch.arange(width, device=q.device) < number
        for turn, short in enumerate(((tokens < 0) & wanted).any(0).tolist()):
            if short:
                more = sample_if_any(without(q, tokens[:, :turn]), generator)
                tokens[:, turn : turn + 1] = torch.where(tokens < 0, more, tokens)[
                    :, turn : turn + 1
                ]
        return Draws(keep_first(tokens, number))

    def draw_with_sure(
        self, q: Tensor, drawn: Tensor, sure: Tensor, generator: torch.Generator
    ) -> Draws:
        """Absent draws stand behind all that are present."""
        if not sure.any():
            tokens = self.draw(q, drawn, generator).tokens
            return Draws(tokens, sure=torch.zeros_like(tokens, dtype=torch.bool))
        tops = keep_first(likeliest(q, int(sure.max())), sure[:, None].to(q.device))
        tops = tops.masked_fill(q.gather(1, tops.clamp(min=0)) == 0, -1)
        others = (
            tops[:, :0] if not drawn.any() else self.draw(without(q, tops), drawn, generator).tokens
        )
        tokens = torch.cat([others, tops], dim=1)
        is_sure = (torch.arange(tokens.shape[1], device=q.device) >= others.shape[1]).expand_as(
            tokens
        )
        return Draws(tokens, is_sure).columns((tokens < 0).int().argsort(dim=-1, stable=True))

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        check(self, q, draws.tokens.shape[1])
        q, tokens = without_sure(q, draws)
        return recursive_rejection(p, laws_of(q, tokens), tokens)

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor | None:
        """None beyond one draw: only enumeration is known."""
        check(self, q, k)
        return overlap(p, q) if k == 1 else None


def without_sure(q: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """q [B, V] without the sure tokens, and the draws [B, K] without them."""
    if draws.sure is None:
        return q, draws.tokens
    tops = draws.tokens.masked_fill(~draws.sure, -1)
    return without(q, tops), draws.tokens.masked_fill(draws.sure, -1)
