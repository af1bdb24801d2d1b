"""Recursive rejection sampling with replacement (Miao et al. 2024, SpecInfer)."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from treespec.trees.tree import Draws
from treespec.verify.laws import (
    Independent,
    laws_of,
    normalise,
    overlap,
    recursive_rejection,
)


@final
@dataclass(frozen=True)
class RRS(Independent):
    """Independent draws, verified one after another as in single-draft speculative sampling.

    The first draw is verified against p. Each refused draw of law q replaces p by its residual
    norm (p - q)+, against which the next draw is verified. Where all are refused, the output comes
    from the last residual.

    q: [B, V], or [B, K, V] with a law for each draw.
    draft_temperatures: multiples of the sampling temperature, one for each draw in order; the last
    one holds for all further draws. Default: all draws have the sampling temperature.
    Raises InputError for a multiple that is not positive or is above 100.
    """

    name: ClassVar[str] = "rrs"
    law_per_draw: ClassVar[bool] = True

    draft_temperatures: tuple[float, ...] = ()

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        return recursive_rejection(p, laws_of(q, draws.tokens.shape[1]), draws.tokens)

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor:
        all_refused = torch.ones_like(p[:, 0])
        residual = p
        for law in laws_of(q, k):
            all_refused = all_refused * (1 - overlap(residual, law))
            residual = normalise((residual - law).clamp_(min=0), residual)
        return 1 - all_refused
