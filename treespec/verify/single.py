"""Single-draft speculative sampling (Leviathan et al. 2023; Chen et al. 2023)."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from treespec.trees.static import StaticTree, chain
from treespec.trees.tree import Draws
from treespec.verify.laws import Independent, overlap, partial_draft, single_draft
from treespec.verify.scheme import LayerScheme


@final
@dataclass(frozen=True)
class Single(Independent, LayerScheme):
    """One draw x ~ q, accepted with probability min(1, p(x)/q(x)).

    Where it is refused, the output comes from the residual norm (p - q)+. The acceptance rate is
    the sum over x of min(p(x), q(x)), which is optimal for one draw.
    """

    name: ClassVar[str] = "single"
    max_draws: ClassVar[int | None] = 1
    accepted_in_turn: ClassVar[bool] = True
    default_tree: ClassVar[StaticTree] = chain(5)

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        return single_draft(p, q, draws.tokens)

    def partial(self, p: Tensor, q: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        drawn = draws.tokens >= 0
        no_sure_tokens = torch.zeros_like(drawn)
        return partial_draft(p, q, draws.tokens, drawn, no_sure_tokens)

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor:
        return overlap(p, q)
