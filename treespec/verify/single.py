"""Single-draft speculative sampling (Leviathan et al. 2023; Chen et al. 2023)."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from treespec.trees.tree import Draws
from treespec.verify.laws import check_one_law, check_width, counts, independent, overlap, single_draft


@final
@dataclass(frozen=True)
class Single:
    """One draw x ~ q; accept with min(1, p/q), else sample norm (p - q)+. Raises InputError for two draws."""

    name: ClassVar[str] = "single"
    deterministic: ClassVar[bool] = False
    lossless: ClassVar[bool] = True

    def draw(self, q: Tensor, k: int | Tensor, generator: torch.Generator) -> Draws:
        check_one_law(q, self.name)
        check_width(counts(q, k)[0], 1, self.name)
        return independent(q, k, generator)

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        check_one_law(q, self.name)
        check_width(draws.tokens.shape[1], 1, self.name)
        return single_draft(p, q, draws.tokens)

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor:
        check_one_law(q, self.name)
        check_width(k, 1, self.name)
        return overlap(p, q)
