"""Recursive rejection sampling with replacement (Miao et al. 2024, SpecInfer)."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from treespec.trees.tree import Draws
from treespec.verify.laws import (
    check_temperatures,
    independent,
    laws_of,
    normalise,
    overlap,
    recursive_rejection,
)
from treespec.verify.scheme import Drawing, Scheme


@final
@dataclass(frozen=True)
class RRS(Scheme):
    """Independent draws, each verified against what the earlier ones left of p.

    q: [B, V] or [B, K, V].

    draft_temperatures: of each draw in order, as multiples of the sampling temperature; the last
    repeats.
    """

    name: ClassVar[str] = "rrs"
    drawing: ClassVar[Drawing] = "with replacement"
    law_per_draw: ClassVar[bool] = True

    draft_temperatures: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_temperatures(self, self.draft_temperatures)

    def draw(self, q: Tensor, k: int | Tensor, generator: torch.Generator) -> Draws:
        return independent(q, k, generator)

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        return recursive_rejection(p, laws_of(q, draws.tokens.shape[1]), draws.tokens)

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor:
        refused = torch.ones_like(p[:, 0])
        for law in laws_of(q, k):
            refused = refused * (1 - overlap(p, law))
            p = normalise((p - law).clamp_(min=0), p)
        return 1 - refused
