"""Compute the probability that draw i of a node is y and y is the output, for a given token y: the share of draw i.

A node has the target's distribution p, the draft's q, and the draws of one scheme. y is the next token of a text that
the target wrote. The verifier's walk continues below draw i if draw i is the first that is y, and y is the output:

    draws        b    y    y         draw 2 gets the plan's mass on y
    column       1    2    3

Most schemes have a closed form of the sum over draws and coins. For the others the draws are sampled, given that one
of them is y, and the plan's mass on y replaces the coins.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.sampling.probs import sample, sample_uniform
from treespec.trees.tree import Draws
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
from treespec.verify.refusals import refuse_in_order
from treespec.verify.rrs import RRSWithoutReplacement
from treespec.verify.scheme import Scheme

RRS_WITHOUT_REPLACEMENT = RRSWithoutReplacement()
# Added to the selection weight of each draw of y, so that the weights' sum is not 0.
MIN_SELECTION_MASS = 1e-9
Form = Callable[["Nodes", int, Scheme], Tensor]  # computes the shares [n, k] of k draws at n nodes


@dataclass(frozen=True)
class Nodes:
    """The nodes along a text, one for each of its n tokens.

    Attributes:
        p: [n, V] the target's probabilities.
        q: [n, V] the draft's probabilities; any scores if the draws are the most likely tokens.
        y: [n] int64, the text's next token.
        generator: draws the samples, for schemes without a closed form.
        samples: number of samples at each node.
    """

    p: Tensor
    q: Tensor
    y: Tensor
    generator: torch.Generator
    samples: int

    def gather_mass(self, masses: Tensor) -> Tensor:
        """Gather the mass on y [n] from masses [n, V]."""
        return masses.gather(1, self.y[:, None]).squeeze(1)

    def repeat_samples(self) -> "Nodes":
        """Copy each node `samples` times, one node after another."""
        p = self.p.repeat_interleave(self.samples, 0)
        q = self.q.repeat_interleave(self.samples, 0)
        y = self.y.repeat_interleave(self.samples, 0)
        return Nodes(p, q, y, self.generator, 1)

    def average_samples(self, columns: Tensor) -> Tensor:
        """Average columns [n * samples, k] over the samples of each node; [n, k]."""
        return columns.view(len(self.y), self.samples, -1).mean(1)

    def mark_first_match(self, tokens: Tensor) -> Tensor:
        """Mark the first draw of y among draws [n, K]; [n, K] bool."""
        is_y = tokens == self.y[:, None]
        return is_y & (is_y.cumsum(1) == 1)

    def draw_containing_token(self, q: Tensor, number: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Draw independently from q, given that at least one draw is y.

        Args:
            q: [n, V] masses.
            number: [n, 1] number of draws at each node.
            width: number of columns of the result, at least the largest `number`.

        Returns:
            The draws [n, width], -1 in columns without a draw; and Pr(a draw is y) [n, 1].
        """
        # 1. The index of the first draw of y has a truncated geometric distribution.
        y = self.y[:, None]
        column = torch.arange(width, device=q.device)
        y_mass = (q.gather(1, y) * scale(q, number > 0)).double().clamp(max=1)
        chance = 1 - (1 - y_mass) ** number
        uniform = sample_uniform(y.shape, self.generator, q.device)
        log_miss = torch.log1p(-y_mass).clamp(max=-torch.finfo(torch.float64).tiny)
        first_column = (torch.log1p(-uniform * chance) / log_miss).nan_to_num(0).long()
        first_column = first_column.clamp(max=(number - 1).clamp(min=0))

        # 2. The draws before it are other tokens, the draws after it any tokens.
        earlier_tokens = draw_iid_children(mask_out(q, y), width, self.generator)
        tokens = draw_iid_children(q, width, self.generator)
        tokens = torch.where(column < first_column, earlier_tokens, tokens).scatter(
            1, first_column, y
        )
        return keep_first(tokens, number), chance.to(q.dtype)


def share_rrs(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """Compute the shares [n, k] of `rrs`. A refused draw leaves the residual norm (p - q)+, whatever its token."""
    residual = nodes.p
    q = nodes.q
    reach = torch.ones_like(nodes.p[:, 0])
    columns = []
    for _ in range(k):
        overlap = torch.minimum(residual, q)
        columns.append(reach * nodes.gather_mass(overlap))
        reach = reach * (1 - overlap.sum(-1))
        residual = normalize_residual((residual - q).clamp_(min=0), residual)
    return torch.stack(columns, 1)


def accept_in_turn(nodes: Nodes, k: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Follow draws without replacement until one is y.

    The refused tokens are sampled from q without y. Importance weights correct for that: if the earlier draws have the
    mass S, the next draw is another token than y with probability (1 - S - q(y)) / (1 - S).

    Args:
        nodes: n nodes.
        k: number of draws at each.
        weight: [n, 1] weight w of each node, as in `treespec.verify.traversal`; None: 1.

    Returns:
        For each draw [n, k]: Pr(it is y, and all earlier draws are refused), and its weight w.
    """
    # 1. The tokens that may be refused before y, and the mass of q that remains at each draw.
    if weight is None:
        weight = torch.ones_like(nodes.p[:, :1])
    y = nodes.y[:, None]
    y_mass = nodes.gather_mass(nodes.q)[:, None]
    rest_of_q = mask_out(nodes.q, y)
    other_tokens = y[:, :0]
    if k > 1:
        other_tokens = RRS_WITHOUT_REPLACEMENT.draw(rest_of_q, k - 1, nodes.generator).tokens
    other_token_masses = nodes.q.gather(1, other_tokens.clamp(min=0)) * (other_tokens >= 0)
    rest_of_q = mask_out(rest_of_q, other_tokens).sum(-1, keepdim=True)
    later_masses = pad(other_token_masses, (0, 1)).flip(1).cumsum(1).flip(1)
    mass_without_y = rest_of_q + later_masses  # [n, k]
    remaining_mass = clamp_positive(mass_without_y + y_mass)

    # 2. The tokens are refused one after another.
    chance = torch.ones_like(y_mass)
    chances = []
    weights = []
    steps: Iterable[tuple[Tensor, Tensor, Tensor]] = [(weight, nodes.p * weight, weight)]
    if k > 1:
        steps = refuse_in_order(nodes.p, nodes.q, Draws(other_tokens), weight)
    for i, (refused, p, _) in enumerate(steps):
        mass = remaining_mass[:, i : i + 1]
        chances.append(chance * y_mass / mass)
        weights.append((p.gather(1, y) / clamp_positive(y_mass / mass)).clamp(max=1))
        chance = chance * mass_without_y[:, i : i + 1] / mass * (1 - refused)
    return torch.cat(chances, 1), torch.cat(weights, 1)


def share_rrs_without_replacement(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """Compute the shares [n, k] of `rrs-wo`. The refused tokens change the later draws, so they are sampled."""
    samples = nodes.repeat_samples()
    chances, weights = accept_in_turn(samples, k)
    return nodes.average_samples(chances * weights)


def share_gumbel(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """Compute the shares [n, k] of `gumbel`.

    Target and draft share exponential times E: the output has the smallest E / p, the draws the k smallest E / q. Given
    that the output is y, let m be the smallest E / p. Then m is exponential of rate 1, E(y) = m p(y), and for every
    other token x, E(x) = m p(x) plus an independent exponential time.
    """
    uniform = sample_uniform(
        (1 + nodes.p.shape[1], len(nodes.p)), nodes.generator, nodes.p.device
    ).T
    excess_times = -uniform[:, 1:].log().scatter(1, nodes.y[:, None], 0)
    times = excess_times - uniform[:, :1].log() * nodes.p
    is_y = select_most_likely(nodes.q / times, k) == nodes.y[:, None]
    return is_y * (nodes.gather_mass(nodes.p) * (nodes.gather_mass(nodes.q) > 0))[:, None]


def share_kseq(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """Compute the shares [n, k] of `kseq`.

    If a draw of y is refused, y may still be the output, by a later draw or by the residual.
    """
    # 1. For one draw: Pr(refused), Pr(y and accepted), Pr(y and refused).
    p = nodes.p
    q = nodes.q
    number = torch.full_like(nodes.y[:, None], k)
    overlap, beta = share_mass(p, q, find_smallest_rho(p, q, number))
    matched_factor = (1 - (1 - beta) ** number) / clamp_positive(beta)
    residual = subtract(p, overlap, matched_factor.to(p.dtype))
    residual_y = nodes.gather_mass(residual) / clamp_positive(residual.sum(-1))
    y_accepted = nodes.gather_mass(overlap)
    refusal = 1 - beta.squeeze(1)
    y_refused = nodes.gather_mass(q) - y_accepted

    # 2. The first draw of y is draw i. y is the output by draw i, by a later draw, or by the residual.
    columns = []
    for i in range(k):
        y_later = torch.zeros_like(refusal)
        for j in range(k - i - 1):
            y_later = y_later + refusal**j * y_accepted
        y_output = y_accepted + y_refused * (y_later + refusal ** (k - i - 1) * residual_y)
        columns.append((refusal - y_refused) ** i * y_output)
    return torch.stack(columns, 1).to(p.dtype)


def share_topk(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """Compute the shares [n, k] of `topk`: the draws are certain, so the share of y is p(y). q: any scores."""
    return (select_most_likely(nodes.q, k) == nodes.y[:, None]) * nodes.gather_mass(nodes.p)[
        :, None
    ]


def share_greedy(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """Compute the shares [n, k] of `greedy`: k - 1 certain tokens, then one draw from q', the rest of q.

    That draw is accepted with probability min(1, p/q').
    """
    certain = share_topk(nodes, k - 1, scheme) * (nodes.gather_mass(nodes.q) > 0)[:, None]
    tail = mask_out(nodes.q, select_most_likely(nodes.q, k - 1))
    sampled = torch.minimum(nodes.p, tail * scale(tail, torch.ones_like(tail[:, :1])))
    return torch.cat([certain, nodes.gather_mass(sampled)[:, None]], 1)


def share_spechub(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """Compute the shares [n, k] of `spechub`.

    Let a be the most likely token (the hub). If y is not a, the draws are (y, a) or (a, y). If y is a, they are (i, a)
    or (a, i), and the other token i is sampled.
    """
    if k == 1:
        return share_greedy(nodes, 1, scheme)
    samples = nodes.repeat_samples()
    y = nodes.y.repeat_interleave(nodes.samples)[:, None]
    hub = samples.q.argmax(-1, keepdim=True)
    tail = mask_out(samples.q, hub)
    other_token = torch.where(y == hub, sample(tail, nodes.generator)[:, None], y)
    has_no_tail = tail.sum(-1, keepdim=True) == 0
    other_token = other_token.masked_fill(has_no_tail, -1)
    hub_mass = samples.q.gather(1, hub)
    tail_mass = tail.sum(-1, keepdim=True)
    chance = torch.where(
        y == hub, tail_mass, samples.q.gather(1, other_token.clamp(min=0))
    )  # of (other, a)
    columns = []
    for first, second, mass in (
        (other_token, hub, chance),
        (hub, other_token, hub_mass * chance / clamp_positive(tail_mass)),
    ):
        plan = (
            scheme.plan(samples.p, samples.q, Draws(torch.cat([first, second], 1))).gather(1, y)
            * mass
        )
        columns.append(torch.cat([plan * (first == y), plan * (second == y)], 1))
    hub_only = samples.p.gather(1, y) * (has_no_tail & (y == hub))  # q is one-hot
    columns.append(torch.cat([hub_only, torch.zeros_like(hub_only)], 1))
    return nodes.average_samples(sum(columns, torch.zeros_like(columns[0])))


def is_lp(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """Compute the shares [n, k] of `is-lp`. The draws are sampled."""
    samples = nodes.repeat_samples()
    tokens, chance = samples.draw_containing_token(
        samples.q, torch.full_like(samples.y[:, None], k), k
    )
    selection_probs, selected = select(samples.p, samples.q, tokens, cast(IsLp, scheme).s)
    return share_selected(nodes, samples, chance, Selection(selected, tokens, selection_probs))


class Selection(NamedTuple):
    """A node's draws, and the distribution of the selected one.

    Attributes:
        selected: [n, V] distribution x of the selected draw.
        tokens: [n, K] the draws.
        chosen: [n, K] Pr(draw i is selected).
    """

    selected: Tensor
    tokens: Tensor
    chosen: Tensor


class OptimalDraws(NamedTuple):
    """Sampled draws of the `optimal` scheme, given that one of them is y.

    Attributes:
        samples: the nodes, each repeated for its samples; n is the number of all samples below.
        sure_tokens: [n, K] tokens that are certain to be draws; -1: none.
        chance: [n, 1] Pr(a random draw is y).
        selection: the selection of one draw.
    """

    samples: Nodes
    sure_tokens: Tensor
    chance: Tensor
    selection: Selection


def draw_for_optimal(nodes: Nodes, k: int, scheme: Optimal) -> OptimalDraws:
    """Sample the draws of `optimal` at n nodes, given that one of them is y. k: budget of distinct draws at each."""
    samples = nodes.repeat_samples()
    tops, number, tail = scheme.split_certain_and_random(
        samples.q, torch.full_like(samples.y[:, None], k), k
    )
    tokens, chance = samples.draw_containing_token(tail, number, scheme.count_max_iid_draws(k))
    draws = scheme.arrange_draws(tops, tokens, nodes.generator)
    selected, tokens, selection_probs = scheme.select_draw(samples.p, samples.q, draws)
    return OptimalDraws(samples, tops, chance, Selection(selected, tokens, selection_probs))


def share_optimal(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """Compute the shares [n, k] of `optimal`: those of the selected draw, and of the certain tokens."""
    draws = draw_for_optimal(nodes, k, cast(Optimal, scheme))
    samples = draws.samples
    share = share_selected(nodes, samples, draws.chance, draws.selection)
    certain_shares = nodes.average_samples(
        (draws.sure_tokens == samples.y[:, None]) * samples.gather_mass(samples.p)[:, None]
    )
    return share[:, :k] * ~(certain_shares > 0).any(-1, keepdim=True) + certain_shares


def share_selected(nodes: Nodes, samples: Nodes, chance: Tensor, selection: Selection) -> Tensor:
    """Compute the shares [n, K] of a scheme that selects one draw and verifies it against its distribution x.

    The shares of all draws of y add up to min(p, x) and the residual's part. The sampled draws only tell how that sum
    is divided.

    Args:
        nodes: n nodes.
        samples: the nodes, each repeated for its samples.
        chance: [n * samples, 1] Pr(a draw is y).
        selection: the draws of the samples, and the selected one.
    """
    is_first_y = samples.mark_first_match(selection.tokens)
    is_y = selection.tokens == samples.y[:, None]
    accepted, unclaimed = accept_one_draft(
        samples.p, selection.selected, selection.tokens, selection.chosen
    )
    refused = (1 - accepted.sum(-1, keepdim=True)).clamp(min=0)
    residual = (
        refused
        * samples.gather_mass(unclaimed)[:, None]
        / clamp_positive(unclaimed.sum(-1, keepdim=True))
    )
    y_accepted = (accepted * is_y).sum(-1, keepdim=True) + MIN_SELECTION_MASS
    draw_weights = nodes.average_samples(is_first_y * y_accepted)
    y_accepted_total = nodes.average_samples(
        torch.minimum(samples.gather_mass(samples.p), samples.gather_mass(selection.selected))[
            :, None
        ]
    )
    residual_share = nodes.average_samples(is_first_y * residual * chance)
    return (
        y_accepted_total * draw_weights / clamp_positive(draw_weights.sum(-1, keepdim=True))
        + residual_share
    )


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
