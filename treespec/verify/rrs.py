"""Recursive rejection sampling with replacement (Miao et al. 2024, SpecInfer)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from treespec.trees.tree import Draws
from treespec.verify.laws import independent, overlap, recursive_rejection, residual, scale


def laws_of(q: Tensor, k: int) -> Iterable[Tensor]:
    """The [B, V] laws of k independent draws. q: [B, V], or [B, K, V]."""
    return q[:, :k].unbind(1) if q.dim() == 3 else [q] * k


@final
@dataclass(frozen=True)
class RRS:
    """Independent draws, each verified against what the earlier ones left of p. q: [B, V] or [B, K, V]."""

    name: ClassVar[str] = "rrs"
    deterministic: ClassVar[bool] = False
    lossless: ClassVar[bool] = True

    def draw(self, q: Tensor, k: int | Tensor, generator: torch.Generator) -> Draws:
        return independent(q, k, generator)

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        return recursive_rejection(p, laws_of(q, draws.tokens.shape[1]), draws.tokens)

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor:
        refused = torch.ones_like(p[:, 0])
        for law in laws_of(q, k):
            refused = refused * (1 - overlap(p, law))
            p = residual(p, law, torch.ones_like(p[:, :1]))
        return 1 - refused
