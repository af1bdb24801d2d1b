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

SPARE = 4  # independent draws for one that is wanted


def laws_of(q: Tensor, tokens: Tensor) -> Iterator[Tensor]:
    """The [B, V] masses that each draw came from: q without the draws before it, not normalised."""
    for token in tokens.split(1, dim=1):
        yield q
        q = without(q, token)


@final
@dataclass(frozen=True)
class RRSWithoutReplacement:
    """Draws one after another, each from q without the earlier ones and verified against that law.

    Independent draws without their repeats are such draws; only where those run short q is searched again.

    A tree may also ask for the likeliest tokens for sure, k: [B, 2]. They come after the sampled draws, which are
    then from q without them, and hold score -1. Recursive rejection by their one-hot laws is to sample what the
    draws leave of p.
    """

    name: ClassVar[str] = "rrs-wo"
    deterministic: ClassVar[bool] = False
    lossless: ClassVar[bool] = True
    max_draws: ClassVar[int | None] = None

    def draw(self, q: Tensor, k: int | Tensor, generator: torch.Generator) -> Draws:
        if isinstance(k, Tensor) and k.dim() == 2:
            return self._with_tops(q, k[:, 0], k[:, 1], generator)
        width, number = counts(q, k)
        check(self, q, width)
        if width == 1:
            return independent(q, k, generator)
        tokens = keep_first(distinct(independent(q, SPARE * width, generator).tokens)[:, :width], number)
        wanted = torch.arange(width, device=q.device) < number
        for turn, short in enumerate(((tokens < 0) & wanted).any(0).tolist()):
            if short:
                more = sample_if_any(without(q, tokens[:, :turn]), generator)
                tokens[:, turn : turn + 1] = torch.where(tokens < 0, more, tokens)[:, turn : turn + 1]
        return Draws(keep_first(tokens, number))

    def _with_tops(self, q: Tensor, number: Tensor, tops: Tensor, generator: torch.Generator) -> Draws:
        """number: [B] sampled draws. tops: [B] tokens for sure. The draws of a node stand at the left."""
        if not tops.any():
            drawn = self.draw(q, number, generator).tokens
            return Draws(drawn, torch.zeros_like(drawn, dtype=q.dtype))
        sure = keep_first(likeliest(q, int(tops.max())), tops[:, None].to(q.device))
        sure = sure.masked_fill(q.gather(1, sure.clamp(min=0)) == 0, -1)
        drawn = sure[:, :0] if not number.any() else self.draw(without(q, sure), number, generator).tokens
        tokens = torch.cat([drawn, sure], dim=1)
        scores = torch.zeros(tokens.shape, dtype=q.dtype, device=q.device)
        scores[:, drawn.shape[1] :] = -1
        left = (tokens < 0).int().argsort(dim=-1, stable=True)
        return Draws(tokens.gather(1, left), scores.gather(1, left))

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        check(self, q, draws.tokens.shape[1])
        q, tokens = without_tops(q, draws)
        return recursive_rejection(p, laws_of(q, tokens), tokens)

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor | None:
        """None beyond one draw: only enumeration is known."""
        check(self, q, k)
        return overlap(p, q) if k == 1 else None


def without_tops(q: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """q [B, V] without the tokens that are there for sure, and the sampled draws [B, K]."""
    if draws.scores is None:
        return q, draws.tokens
    sure = draws.scores < 0
    return without(q, draws.tokens.masked_fill(~sure, -1)), draws.tokens.masked_fill(sure, -1)
