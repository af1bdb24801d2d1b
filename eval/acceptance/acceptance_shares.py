"""The shares of a node's draws in the output y: Pr(draw i is y, and y is the output), for a given token y.

Target p, draft q, and one scheme's draws at a node. A text that the target wrote has y next. The walk
goes on below draw i if that is the first with the token y, and the output is y:

    draws        b    y    y         y is the output with the plan's mass on it: draw 2 carries it
    column       1    2    3

Summed over draws and coins, most schemes have a closed form. For the others the draws are sampled, given that
one of them is y, and the plan's mass on y stands for the coins.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.sampling.probs import sample, sample_uniform
from treespec.trees.tree import Draws
from treespec.verify import traversal
from treespec.verify.distributions import (
    accept_one_draft,
    clamp_positive,
    draw_iid_children,
    keep_first,
    mask_out,
    normalize_residual,
    scale,
    select_most_likely,
    subtract,
)
from treespec.verify.is_lp import IsLp, select
from treespec.verify.kseq import find_smallest_rho, share_mass
from treespec.verify.optimal import Optimal
from treespec.verify.rrs import RRSWithoutReplacement
from treespec.verify.scheme import Scheme

RRS_WITHOUT_REPLACEMENT = RRSWithoutReplacement()
MIN_SELECTION_MASS = (
    1e-9  # mass of each draw of y in the choice of the selected one, which may be another token
)
Form = Callable[["Nodes", int, Scheme], Tensor]


@dataclass(frozen=True)
class Nodes:
    """The nodes that a text passes, one for each of its n tokens.

    p, q: [n, V] probabilities of target and draft; q may be scores if the most likely tokens are the draws. y: [n]
    int64 the text's next token. generator: of the draws that are sampled. samples: their number at each node.
    """

    p: Tensor
    q: Tensor
    y: Tensor
    generator: torch.Generator
    samples: int

    def gather_mass(self, masses: Tensor) -> Tensor:
        """The mass on y [n] of masses [n, V]."""
        return masses.gather(1, self.y[:, None]).squeeze(1)

    def repeat_samples(self) -> "Nodes":
        """Copy each node `samples` times, one node after another."""
        p = self.p.repeat_interleave(self.samples, 0)
        q = self.q.repeat_interleave(self.samples, 0)
        y = self.y.repeat_interleave(self.samples, 0)
        return Nodes(p, q, y, self.generator, 1)

    def average_samples(self, columns: Tensor) -> Tensor:
        """Average [n samples, k] over the samples of each node; [n, k]."""
        return columns.view(len(self.y), self.samples, -1).mean(1)

    def mark_first_match(self, tokens: Tensor) -> Tensor:
        """Mark the first draw of y among draws [n, K]; [n, K] bool."""
        drawn = tokens == self.y[:, None]
        return drawn & (drawn.cumsum(1) == 1)

    def draw_containing_token(self, q: Tensor, number: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Draw independently from q, given that one draw is y.

        Args:
            q: [n, V] masses.
            number: [n, 1] of draws at each node.
            width: columns for them.

        Returns:
            The draws [n, width], -1 in columns without one; and Pr(a draw is y) [n, 1].
        """
        # 1. Which draw is the first of y: a geometric number, cut off.
        y = self.y[:, None]
        column = torch.arange(width, device=q.device)
        here = (q.gather(1, y) * scale(q, number > 0)).double().clamp(max=1)
        chance = 1 - (1 - here) ** number
        uniform = sample_uniform(y.shape, self.generator, q.device)
        miss = torch.log1p(-here).clamp(max=-torch.finfo(torch.float64).tiny)
        at = (torch.log1p(-uniform * chance) / miss).nan_to_num(0).long()
        at = at.clamp(max=(number - 1).clamp(min=0))

        # 2. Those before it are other tokens, those after it any.
        before = draw_iid_children(mask_out(q, y), width, self.generator)
        tokens = draw_iid_children(q, width, self.generator)
        tokens = torch.where(column < at, before, tokens).scatter(1, at, y)
        return keep_first(tokens, number), chance.to(q.dtype)


def share_rrs(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """The shares [n, k] of `rrs`. A refused draw leaves norm (p - q)+ whichever token it was."""
    left = nodes.p
    q = nodes.q
    reach = torch.ones_like(nodes.p[:, 0])
    columns = []
    for _ in range(k):
        both = torch.minimum(left, q)
        columns.append(reach * nodes.gather_mass(both))
        reach = reach * (1 - both.sum(-1))
        left = normalize_residual((left - q).clamp_(min=0), left)
    return torch.stack(columns, 1)


def accept_in_turn(nodes: Nodes, k: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Follow draws without replacement until one is y.

    The refused tokens are sampled from the others, and weighed: an earlier draw with S drawn before it is another token
    with (1 - S - q(y)) / (1 - S).

    Args:
        nodes: n nodes.
        k: number of draws at each.
        weight: [n, 1] w of the node, as in `treespec.verify.traversal`; None: 1.

    Returns:
        For draw 1 … k [n, k]: Pr(it is y, and all draws before it are refused), and w of it.
    """
    # 1. Tokens that may be refused before y, and what each leaves of q.
    if weight is None:
        weight = torch.ones_like(nodes.p[:, :1])
    y = nodes.y[:, None]
    here = nodes.gather_mass(nodes.q)[:, None]
    rest = mask_out(nodes.q, y)
    others = y[:, :0]
    if k > 1:
        others = RRS_WITHOUT_REPLACEMENT.draw(rest, k - 1, nodes.generator).tokens
    at_q = nodes.q.gather(1, others.clamp(min=0)) * (others >= 0)
    rest = mask_out(rest, others).sum(-1, keepdim=True)
    other = rest + pad(at_q, (0, 1)).flip(1).cumsum(1).flip(1)  # [n, k] the mass without y
    left = clamp_positive(other + here)

    # 2. They are refused one after another.
    chance = torch.ones_like(here)
    chances = []
    weights = []
    steps: Iterable[tuple[Tensor, Tensor, Tensor]] = [(weight, nodes.p * weight, weight)]
    if k > 1:
        steps = traversal.refuse_in_order(nodes.p, nodes.q, Draws(others), weight)
    for i, (refused, p, _) in enumerate(steps):
        mass = left[:, i : i + 1]
        chances.append(chance * here / mass)
        weights.append((p.gather(1, y) / clamp_positive(here / mass)).clamp(max=1))
        chance = chance * other[:, i : i + 1] / mass * (1 - refused)
    return torch.cat(chances, 1), torch.cat(weights, 1)


def share_rrs_without_replacement(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """The shares [n, k] of `rrs-wo`. Refused tokens change the draws after them, so they are sampled."""
    many = nodes.repeat_samples()
    chances, weights = accept_in_turn(many, k)
    return nodes.average_samples(chances * weights)


def share_gumbel(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """The shares [n, k] of `gumbel`.

    Target and draft share exponential times E: the output has the least E / p, the draws the k least E / q.
    Given that the output is y, the least E / p is exponential of rate 1, y's E is its p times that, and
    every other E is so, and an exponential time more.
    """
    uniform = sample_uniform(
        (1 + nodes.p.shape[1], len(nodes.p)), nodes.generator, nodes.p.device
    ).T
    more = -uniform[:, 1:].log().scatter(1, nodes.y[:, None], 0)
    times = more - uniform[:, :1].log() * nodes.p
    drawn = select_most_likely(nodes.q / times, k) == nodes.y[:, None]
    return drawn * (nodes.gather_mass(nodes.p) * (nodes.gather_mass(nodes.q) > 0))[:, None]


def share_kseq(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """The shares [n, k] of `kseq`.

    If a draw of y is refused, a later draw of y, or the residual, may output it too.
    """
    # 1. Of one draw, Pr(accepted), Pr(y, accepted), Pr(y, refused).
    p = nodes.p
    q = nodes.q
    number = torch.full_like(nodes.y[:, None], k)
    both, beta = share_mass(p, q, find_smallest_rho(p, q, number))
    paid = (1 - (1 - beta) ** number) / clamp_positive(beta)
    residual = subtract(p, both, paid.to(p.dtype))
    last = nodes.gather_mass(residual) / clamp_positive(residual.sum(-1))
    accepted = nodes.gather_mass(both)
    miss = 1 - beta.squeeze(1)
    refused = nodes.gather_mass(q) - accepted

    # 2. The first draw of y is draw i; y is the output there, at a later draw, or at the end.
    columns = []
    for i in range(k):
        later = torch.zeros_like(miss)
        for j in range(k - i - 1):
            later = later + miss**j * accepted
        then = accepted + refused * (later + miss ** (k - i - 1) * last)
        columns.append((miss - refused) ** i * then)
    return torch.stack(columns, 1).to(p.dtype)


def share_topk(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """The shares [n, k] of `topk`: tokens that are drawn for sure carry all of their p. q: any scores."""
    return (select_most_likely(nodes.q, k) == nodes.y[:, None]) * nodes.gather_mass(nodes.p)[
        :, None
    ]


def share_greedy(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """The shares [n, k] of `greedy`: k - 1 certain tokens, and a draw from the rest of q.

    That draw is accepted with probability min(1, p/q').
    """
    sure = share_topk(nodes, k - 1, scheme) * (nodes.gather_mass(nodes.q) > 0)[:, None]
    rest = mask_out(nodes.q, select_most_likely(nodes.q, k - 1))
    last = torch.minimum(nodes.p, rest * scale(rest, torch.ones_like(rest[:, :1])))
    return torch.cat([sure, nodes.gather_mass(last)[:, None]], 1)


def share_spechub(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """The shares [n, k] of `spechub`.

    With a the most likely token, the draws are (y, a), (a, y), (i, a) or (a, j). i and j are sampled if y is a.
    """
    if k == 1:
        return share_greedy(nodes, 1, scheme)
    many = nodes.repeat_samples()
    y = nodes.y.repeat_interleave(nodes.samples)[:, None]
    a = many.q.argmax(-1, keepdim=True)
    rest = mask_out(many.q, a)
    other = torch.where(y == a, sample(rest, nodes.generator)[:, None], y)
    absent = rest.sum(-1, keepdim=True) == 0
    other = other.masked_fill(absent, -1)
    at_a = many.q.gather(1, a)
    left = rest.sum(-1, keepdim=True)
    chance = torch.where(y == a, left, many.q.gather(1, other.clamp(min=0)))  # of (other, a)
    columns = []
    for first, second, mass in (
        (other, a, chance),
        (a, other, at_a * chance / clamp_positive(left)),
    ):
        plan = scheme.plan(many.p, many.q, Draws(torch.cat([first, second], 1))).gather(1, y) * mass
        columns.append(torch.cat([plan * (first == y), plan * (second == y)], 1))
    alone = many.p.gather(1, y) * (absent & (y == a))  # q is one-hot
    columns.append(torch.cat([alone, torch.zeros_like(alone)], 1))
    return nodes.average_samples(sum(columns, torch.zeros_like(columns[0])))


def is_lp(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """The shares [n, k] of `is-lp`, whose draws are sampled."""
    many = nodes.repeat_samples()
    tokens, chance = many.draw_containing_token(many.q, torch.full_like(many.y[:, None], k), k)
    chosen, selected = select(many.p, many.q, tokens, cast(IsLp, scheme).s)
    return share_selected(nodes, many, chance, Selection(selected, tokens, chosen))


class Selection(NamedTuple):
    """selected: [n, V] the selected draw's distribution. tokens: [n, K]. chosen: [n, K] Pr(it is that draw)."""

    selected: Tensor
    tokens: Tensor
    chosen: Tensor


class OptimalDraws(NamedTuple):
    """Sampled draws of the `optimal` scheme at nodes, one of which is y.

    samples: the `repeated` nodes. sure_tokens: [n, K] those that are draws for sure, -1 for none. chance: [n, 1] Pr(a
    random draw is y). selection: of one draw.
    """

    samples: Nodes
    sure_tokens: Tensor
    chance: Tensor
    selection: Selection


def draw_for_optimal(nodes: Nodes, k: int, scheme: Optimal) -> OptimalDraws:
    """Sample the draws of `optimal` at `repeated` nodes, given that one of them is y."""
    many = nodes.repeat_samples()
    tops, number, rest = scheme.split_certain_and_random(
        many.q, torch.full_like(many.y[:, None], k), k
    )
    tokens, chance = many.draw_containing_token(rest, number, scheme.count_max_iid_draws(k))
    draws = scheme.arrange_draws(tops, tokens, nodes.generator)
    selected, tokens, chosen = scheme.select_draw(many.p, many.q, draws)
    return OptimalDraws(many, tops, chance, Selection(selected, tokens, chosen))


def share_optimal(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """The shares [n, k] of `optimal`: those of the selected draw, and of the sure tokens."""
    draws = draw_for_optimal(nodes, k, cast(Optimal, scheme))
    many = draws.samples
    share = share_selected(nodes, many, draws.chance, draws.selection)
    sure = nodes.average_samples(
        (draws.sure_tokens == many.y[:, None]) * many.gather_mass(many.p)[:, None]
    )
    return share[:, :k] * ~(sure > 0).any(-1, keepdim=True) + sure


def share_selected(nodes: Nodes, many: Nodes, chance: Tensor, of: Selection) -> Tensor:
    """The shares [n, K] if one draw is selected, and accepted as a draw of its distribution x.

    All draws of y together have min(p, x). The sampled draws only divide that among them, and add the residual's part.

    Args:
        nodes: n nodes.
        many: the `repeated` ones.
        chance: [n samples, 1] Pr(a draw is y), as in the sampled draws.
        of: the selected draws at the repeated nodes.
    """
    first = many.mark_first_match(of.tokens)
    drawn = of.tokens == many.y[:, None]
    accepted, unclaimed = accept_one_draft(many.p, of.selected, of.tokens, of.chosen)
    refused = (1 - accepted.sum(-1, keepdim=True)).clamp(min=0)
    residual = (
        refused
        * many.gather_mass(unclaimed)[:, None]
        / clamp_positive(unclaimed.sum(-1, keepdim=True))
    )
    accepted_here = (accepted * drawn).sum(-1, keepdim=True) + MIN_SELECTION_MASS
    which = nodes.average_samples(first * accepted_here)
    total = nodes.average_samples(
        torch.minimum(many.gather_mass(many.p), many.gather_mass(of.selected))[:, None]
    )
    residual_share = nodes.average_samples(first * residual * chance)
    return total * which / clamp_positive(which.sum(-1, keepdim=True)) + residual_share


SHARES_BY_SCHEME: Mapping[str, Form] = {
    "single": share_greedy,
    "greedy": share_greedy,
    "topk": share_topk,
    "rrs": share_rrs,
    "rrs-wo": share_rrs_without_replacement,
    "gumbel": share_gumbel,
    "kseq": share_kseq,
    "spechub": share_spechub,
    "is-lp": is_lp,
    "optimal": share_optimal,
}
