"""Deterministic drafts (EAGLE-2 and 3, retrieval): the likeliest tokens, or any fixed set."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from treespec.trees.tree import Draws
from treespec.verify.laws import check, counts, keep_first, likeliest
from treespec.verify.scheme import Scheme


@dataclass(frozen=True)
class TopK(Scheme):
    """The k likeliest tokens of q. The output is sampled from p, and accepted if it is a draw.

    That is optimal for these draws. q may be any scores [B, V], such as logits: only their order
    counts.
    """

    name: ClassVar[str] = "topk"
    deterministic: ClassVar[bool] = True

    def draw(self, q: Tensor, k: int | Tensor, generator: torch.Generator) -> Draws:
        width, number = counts(q, k)
        check(self, q, width)
        return Draws(keep_first(likeliest(q, width), number))

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        return p

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor:
        check(self, q, k)
        return p.gather(1, q.topk(min(k, q.shape[-1])).indices).sum(-1)
