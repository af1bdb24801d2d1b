"""Block verification of the draws that `optimal` selects: treespec's own, as `block-optimal`.

A node with weight w (`treespec.verify.traversal`) answers its draws as `optimal` does for the target w p. What w p
lacks of 1 is a token that nothing drafts: the refusal of the node. So one draw is selected, of known distribution x:

    selected    w_c = min(1, w p/x)
    sure        in turn, w_c = r / R            r = (w p - x)+ at the token; R = 1 - w + the mass of r, less
                                                what the sure tokens before it have taken
    node        w = S / (S + 1 - w)             S: the mass of r on all other tokens

At each node it accepts the most of w p, which is the most that any lossless verifier keeps where only the last level
branches. Elsewhere others may keep more, for it does not look at what hangs below a child (tests/test_bound.py).

With K - 1 sure tokens and one draw (threshold=0, extra=0) that is the transport at a node, scaled by the probability of
its prefix, of which UniVer's abstract tells (2605.04543).
"""

from functools import partial
from typing import cast

from torch import Tensor

from treespec.trees.tree import Draws
from treespec.verify.distributions import clamp_positive, divide_probabilities, mask_out, scale
from treespec.verify.optimal import Optimal
from treespec.verify.scheme import Scheme
from treespec.verify.traversal import RefusalStep, Refused, Traversal


def refuse_selected_first(
    scheme: Optimal, p: Tensor, q: Tensor, draws: Draws, weight: Tensor
) -> Refused:
    """Refusals of `treespec.verify.traversal`. A draw that is not selected has w 0."""
    # 1. The selected draw, and what it leaves.
    assert draws.sure is not None
    target = p * weight
    x, tokens, chosen = scheme.select_draw(target, q, draws)  # x: [n, V]
    x = x * scale(x, chosen.any(-1, keepdim=True))
    at = tokens.clamp(min=0)
    accepted = divide_probabilities(target.gather(1, at), x.gather(1, at)) * chosen
    rest = (target - x).clamp_(min=0)

    # 2. The sure ones take it in turn.
    sure = tokens.masked_fill(~draws.sure, -1)
    taken = rest.gather(1, sure.clamp(min=0)) * (sure >= 0)
    left = rest.sum(-1, keepdim=True) + (1 - weight) - taken.cumsum(-1) + taken
    for of_draw in (accepted + (taken / clamp_positive(left)).clamp(max=1)).split(1, dim=1):
        yield RefusalStep(of_draw, rest, weight)

    # 3. The nodes themselves.
    rest = mask_out(rest, sure)
    kept = rest.sum(-1, keepdim=True)
    weight = kept / clamp_positive(kept + (1 - weight))
    yield RefusalStep(weight, rest, weight)


def build_block_optimal(scheme: Scheme) -> Traversal:
    return Traversal("block-optimal", scheme, partial(refuse_selected_first, cast(Optimal, scheme)))
