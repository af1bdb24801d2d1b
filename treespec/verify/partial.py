"""The seam of layer verification: a scheme's plan for a part of p, as masses."""

from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from treespec.trees.tree import Draws
from treespec.verify.laws import ratio, scale, subtract, without
from treespec.verify.scheme import Scheme


class LayerScheme(Scheme, Protocol):
    """A scheme whose mean acceptance of each token, over all draws, has a closed form in p, q."""

    @property
    def layered(self) -> bool:
        return True

    def partial(self, p: Tensor, q: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """The accepted mass on each draw, [B, K], and the mass left of p, [B, V].

        p: [B, V] masses, each row with a sum of at most 1.

        The rule: the sum over draws of Pr(draws | q) * accepted mass, plus the mass left, is p. The
        accepted mass sums to at most 1 for any draws. The mass left depends on p and q alone.
        """
        ...


def takes_layers(scheme: Scheme) -> TypeGuard[LayerScheme]:
    """Whether the scheme is a `LayerScheme`, in the type checker's terms."""
    return scheme.layered


def partial_draft(
    p: Tensor, law: Tensor, tokens: Tensor, chosen: Tensor, sure: Tensor
) -> tuple[Tensor, Tensor]:
    """`partial` for one draw of a known law, beside sure tokens.

    The draw accepts min(1, p/law). Where it is refused, the sure tokens take their p from the
    refused mass. On average that mass is 1 - the sum of min(p, law), which is at least their p.

    p: [B, V] masses.
    law: [B, V] the law of the draw, 0 on the sure tokens.
    tokens: [B, K]. chosen, sure: [B, K] bool, which token is the draw and which tokens are sure.
    """
    # 1. The draw, as a single draft.
    at = tokens.clamp(min=0)
    mass = p.gather(1, at)
    weight = scale(law, chosen.any(-1, keepdim=True))
    accepted = ratio(mass, law.gather(1, at) * weight) * chosen

    # 2. p without what the draw and the sure tokens take.
    left = without(subtract(p, law, weight), tokens.masked_fill(~sure, -1))

    # 3. The sure tokens' share of the refused mass.
    sure_mass = mass * sure
    outside = (1 - p.sum(-1, keepdim=True)).clamp(min=0)
    mean_refused = outside + sure_mass.sum(-1, keepdim=True) + left.sum(-1, keepdim=True)
    refused = 1 - accepted.sum(-1, keepdim=True)
    tiny = torch.finfo(p.dtype).tiny
    return accepted + refused * sure_mass / mean_refused.clamp(min=tiny), left
