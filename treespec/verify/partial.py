"""The seam of layer verification: a scheme's plan for a part of p, as mass on the draws and mass
left over.
"""

from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from treespec.trees.tree import Draws
from treespec.verify.laws import ratio, scale, subtract, without
from treespec.verify.scheme import Scheme


class LayerScheme(Scheme, Protocol):
    """A scheme whose acceptance of a token, averaged over the draws, is a function of p and q in
    closed form.
    """

    @property
    def layered(self) -> bool:
        return True

    def partial(self, p: Tensor, q: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """[B, K] accepted mass on each draw, [B, V] what is left of p.

        p: [B, V] masses, at most 1 in all.

        The rule: the sum over draws of Pr(draws | q) * accepted mass, plus the mass left, is p. The
        accepted mass is at most 1 for any draws. The mass left depends on p and q alone.
        """
        ...


def takes_layers(scheme: Scheme) -> TypeGuard[LayerScheme]:
    return scheme.layered


def partial_draft(
    p: Tensor, law: Tensor, tokens: Tensor, chosen: Tensor, sure: Tensor
) -> tuple[Tensor, Tensor]:
    """`partial` for one draw of a known law beside tokens that are drawn for sure.

    The draw takes min(1, p / law). Where it is refused, the sure tokens take their p from the mass
    that it has not taken, 1 - the sum of min(p, law) on average, which is more than their p.
    p: [B, V]. law: [B, V], that of the draw, 0 on the sure tokens. tokens: [B, K]. chosen, sure:
    [B, K] bool, which of them is that draw and which are sure.
    """
    at = tokens.clamp(min=0)
    mass = p.gather(1, at)
    weight = scale(law, chosen.any(-1, keepdim=True))
    accepted = ratio(mass, law.gather(1, at) * weight) * chosen
    left = without(subtract(p, law, weight), tokens.masked_fill(~sure, -1))
    mass = mass * sure
    untaken = (
        (1 - p.sum(-1, keepdim=True)).clamp(min=0)
        + mass.sum(-1, keepdim=True)
        + left.sum(-1, keepdim=True)
    )
    refused = 1 - accepted.sum(-1, keepdim=True)
    return accepted + refused * mass / untaken.clamp(min=torch.finfo(p.dtype).tiny), left
