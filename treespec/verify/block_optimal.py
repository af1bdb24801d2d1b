"""Block verification of the draws that `optimal` selects: the verifier `block-optimal`.

A node with weight w (`treespec.verify.traversal`) answers its draws as `optimal` does for the target w p. The missing
mass 1 - w stands for refusing the node. One draw is selected, with a known distribution x:

    selected    w_c = min(1, w p/x)
    sure        in turn, w_c = r / R            r = (w p - x)+ at the token; R = 1 - w + the mass of r, less
                                                r at the sure tokens before it
    node        w = S / (S + 1 - w)             S: the mass of r on all other tokens

Each node accepts as much of w p as a lossless verifier can. In a tree that branches at its last level only, no lossless
verifier keeps more tokens. In other trees one may keep more, because this rule ignores the subtree below a child
(tests/test_bound.py).

With K - 1 sure tokens and one draw (threshold=0, extra=0) the rule is the transport at a node, scaled by the
probability of its prefix, as in the abstract of UniVer (2605.04543).
"""

from functools import partial
from typing import cast

from torch import Tensor

from treespec.trees.tree import Draws
from treespec.verify.distributions import clamp_positive, divide_probabilities, mask_out, scale
from treespec.verify.optimal import Optimal
from treespec.verify.refusals import RefusalStep, Refused
from treespec.verify.scheme import Scheme
from treespec.verify.traversal import Traversal


def refuse_selected_first(
    scheme: Optimal, p: Tensor, q: Tensor, draws: Draws, weight: Tensor
) -> Refused:
    """Refuse the draws of n nodes in turn: the selected draw, then the sure tokens, then the nodes.

    The weight of a draw that is neither selected nor sure is 0.

    Args:
        scheme: selects the draw.
        p, q: [n, V] probabilities of the target and of the draft.
        draws: of the nodes, the sure ones last.
        weight: [n, 1] w of the nodes.

    Yields: a `treespec.verify.refusals.RefusalStep` for each column of draws, and one for the nodes.
    """
    # 1. The selected draw, and the residual without it.
    assert draws.sure is not None
    target = p * weight
    selected_probs, tokens, chosen = scheme.select_draw(target, q, draws)  # x: [n, V]
    selected_probs = selected_probs * scale(selected_probs, chosen.any(-1, keepdim=True))
    token_index = tokens.clamp(min=0)
    accepted = (
        divide_probabilities(target.gather(1, token_index), selected_probs.gather(1, token_index))
        * chosen
    )
    residual = (target - selected_probs).clamp_(min=0)

    # 2. The sure tokens take their residual mass in turn.
    certain_tokens = tokens.masked_fill(~draws.sure, -1)
    certain_mass = residual.gather(1, certain_tokens.clamp(min=0)) * (certain_tokens >= 0)
    remaining_mass = (
        residual.sum(-1, keepdim=True) + (1 - weight) - certain_mass.cumsum(-1) + certain_mass
    )
    for draw_weight in (
        accepted + (certain_mass / clamp_positive(remaining_mass)).clamp(max=1)
    ).split(1, dim=1):
        yield RefusalStep(draw_weight, residual, weight)

    # 3. The nodes themselves.
    residual = mask_out(residual, certain_tokens)
    residual_mass = residual.sum(-1, keepdim=True)
    weight = residual_mass / clamp_positive(residual_mass + (1 - weight))
    yield RefusalStep(weight, residual, weight)


def build_block_optimal(scheme: Scheme) -> Traversal:
    """Return the verifier `block-optimal` over the scheme `optimal` with its options."""
    return Traversal("block-optimal", scheme, partial(refuse_selected_first, cast(Optimal, scheme)))
