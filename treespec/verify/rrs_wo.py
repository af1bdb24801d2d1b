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
    keep_first,
    overlap,
    recursive_rejection,
    sample_if_any,
    without,
)


def laws_of(q: Tensor, tokens: Tensor) -> Iterator[Tensor]:
    """The [B, V] masses that each draw came from: q without the draws before it, not normalised."""
    for token in tokens.split(1, dim=1):
        yield q
        q = without(q, token)


@final
@dataclass(frozen=True)
class RRSWithoutReplacement:
    """Draws one after another, each from q without the earlier ones and verified against that law."""

    name: ClassVar[str] = "rrs-wo"
    deterministic: ClassVar[bool] = False
    lossless: ClassVar[bool] = True
    max_draws: ClassVar[int | None] = None

    def draw(self, q: Tensor, k: int | Tensor, generator: torch.Generator) -> Draws:
        width, number = counts(q, k)
        check(self, q, width)
        tokens = []
        for _ in range(width):
            tokens.append(sample_if_any(q, generator))
            q = without(q, tokens[-1])
        return Draws(keep_first(torch.cat(tokens, dim=1), number))

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        check(self, q, draws.tokens.shape[1])
        return recursive_rejection(p, laws_of(q, draws.tokens), draws.tokens)

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor | None:
        """None beyond one draw: only enumeration is known."""
        check(self, q, k)
        return overlap(p, q) if k == 1 else None
