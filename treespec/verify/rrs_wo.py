"""Recursive rejection sampling without replacement (Jeon et al. 2024, RSD; Chen et al. 2024, Sequoia; EAGLE-1)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from treespec.trees.tree import Draws
from treespec.verify.laws import (
    check_one_law,
    counts,
    keep_first,
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

    def draw(self, q: Tensor, k: int | Tensor, generator: torch.Generator) -> Draws:
        check_one_law(q, self.name)
        width, number = counts(q, k)
        tokens = []
        for _ in range(width):
            tokens.append(sample_if_any(q, generator))
            q = without(q, tokens[-1])
        return Draws(keep_first(torch.cat(tokens, dim=1), number))

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        check_one_law(q, self.name)
        return recursive_rejection(p, laws_of(q, draws.tokens), draws.tokens)

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> None:
        """Only enumeration is known."""
        return None
