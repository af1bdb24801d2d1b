"""Which draw of a node carries the output: Pr(draw i is y, and y is the output), for a given token y.

Target p, draft q, and one scheme's draws at a node. A text that the target wrote has y next. The walk
goes on below draw i if that is the first with the token y, and the output is y:

    draws        b    y    y         y is the output with the plan's mass on it: draw 2 carries it
    column       1    2    3

Summed over draws and coins, most schemes have a closed form. For the others the draws are sampled, given that
one of them is y, and the plan's mass on y stands for the coins.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.sampling.probs import sample, uniforms
from treespec.trees.tree import Draws
from treespec.verify import traversal
from treespec.verify.distributions import (
    independent,
    keep_first,
    most_likely,
    normalise,
    one_draft,
    positive,
    scale,
    subtract,
    without,
)
from treespec.verify.is_lp import IsLp, select
from treespec.verify.kseq import shared, smallest_rho
from treespec.verify.optimal import Optimal
from treespec.verify.rrs import RRSWithoutReplacement
from treespec.verify.scheme import Scheme

DRAWS = RRSWithoutReplacement()
TINY = 1e-9  # of what tells which draw was selected, where it was none of y
Form = Callable[["Nodes", int, Scheme], Tensor]


@dataclass(frozen=True)
class Nodes:
    """n nodes. p, q: [n, V] probabilities; q are scores where the most likely tokens are drawn. y: [n] int64.

    generator, samples: of what is sampled, for each node.
    """

    p: Tensor
    q: Tensor
    y: Tensor
    generator: torch.Generator
    samples: int

    def on(self, masses: Tensor) -> Tensor:
        """[n] the mass on y of masses [n, V]."""
        return masses.gather(1, self.y[:, None]).squeeze(1)

    def repeated(self) -> "Nodes":
        """`samples` copies, one node's after another's."""
        p, q, y = (part.repeat_interleave(self.samples, 0) for part in (self.p, self.q, self.y))
        return Nodes(p, q, y, self.generator, 1)

    def averaged(self, columns: Tensor) -> Tensor:
        """[n, k] the means over samples of [n samples, k]."""
        return columns.view(len(self.y), self.samples, -1).mean(1)

    def first(self, tokens: Tensor) -> Tensor:
        """[n, K] bool, the first draw of y among draws [n, K]."""
        drawn = tokens == self.y[:, None]
        return drawn & (drawn.cumsum(1) == 1)

    def containing(self, q: Tensor, number: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """`number` [n, 1] independent draws [n, width] from q, given that one is y; and Pr(one is) [n, 1].

        q: [n, V] masses.
        """
        # 1. Which draw is the first of y: a geometric number, cut off.
        y = self.y[:, None]
        column = torch.arange(width, device=q.device)
        here = (q.gather(1, y) * scale(q, number > 0)).double().clamp(max=1)
        chance = 1 - (1 - here) ** number
        uniform = uniforms(y.shape, self.generator, q.device)
        miss = torch.log1p(-here).clamp(max=-torch.finfo(torch.float64).tiny)
        at = (torch.log1p(-uniform * chance) / miss).nan_to_num(0).long()
        at = at.clamp(max=(number - 1).clamp(min=0))

        # 2. Those before it are other tokens, those after it any.
        before = independent(without(q, y), width, self.generator)
        tokens = independent(q, width, self.generator)
        tokens = torch.where(column < at, before, tokens).scatter(1, at, y)
        return keep_first(tokens, number), chance.to(q.dtype)


def rrs(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """Refused, a draw leaves norm (p - q)+, whichever token it was. So each draw is reached by chance alone."""
    left = nodes.p
    q = nodes.q
    reach = torch.ones_like(nodes.p[:, 0])
    columns = []
    for _ in range(k):
        both = torch.minimum(left, q)
        columns.append(reach * nodes.on(both))
        reach = reach * (1 - both.sum(-1))
        left = normalise((left - q).clamp_(min=0), left)
    return torch.stack(columns, 1)


def in_turn(nodes: Nodes, k: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """For draw 1 … k without replacement: Pr(it is y, and all draws before it are refused), and w of it; [n, k] each.

    weight: [n, 1] w of the node, as in `treespec.verify.traversal`; None: 1. The refused tokens are sampled from
    the others, and weighed: an earlier draw with S drawn before it is another token with (1 - S - q(y)) / (1 - S).
    """
    # 1. Tokens that may be refused before y, and what each leaves of q.
    weight = torch.ones_like(nodes.p[:, :1]) if weight is None else weight
    y = nodes.y[:, None]
    here = nodes.on(nodes.q)[:, None]
    rest = without(nodes.q, y)
    others = y[:, :0] if k == 1 else DRAWS.draw(rest, k - 1, nodes.generator).tokens
    at_q = nodes.q.gather(1, others.clamp(min=0)) * (others >= 0)
    rest = without(rest, others).sum(-1, keepdim=True)
    other = rest + pad(at_q, (0, 1)).flip(1).cumsum(1).flip(1)  # [n, k] the mass without y
    left = positive(other + here)

    # 2. They are refused one after another.
    chance = torch.ones_like(here)
    chances = []
    weights = []
    alone = [(weight, nodes.p * weight, weight)]
    steps = traversal.in_turn(nodes.p, nodes.q, Draws(others), weight) if k > 1 else alone
    for i, (refused, p, _) in enumerate(steps):
        mass = left[:, i : i + 1]
        chances.append(chance * here / mass)
        weights.append((p.gather(1, y) / positive(here / mass)).clamp(max=1))
        chance = chance * other[:, i : i + 1] / mass * (1 - refused)
    return torch.cat(chances, 1), torch.cat(weights, 1)


def rrs_wo(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """The refused tokens change the draws after them: they are sampled."""
    many = nodes.repeated()
    chances, weights = in_turn(many, k)
    return nodes.averaged(chances * weights)


def gumbel(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """Target and draft share exponential times E: the output has the least E / p, the draws the k least E / q.

    Given that the output is y, the least E / p is exponential of rate 1, y's E is its p times that, and
    every other E is so, and an exponential time more.
    """
    uniform = uniforms((1 + nodes.p.shape[1], len(nodes.p)), nodes.generator, nodes.p.device).T
    more = -uniform[:, 1:].log().scatter(1, nodes.y[:, None], 0)
    times = more - uniform[:, :1].log() * nodes.p
    drawn = most_likely(nodes.q / times, k) == nodes.y[:, None]
    return drawn * (nodes.on(nodes.p) * (nodes.on(nodes.q) > 0))[:, None]


def kseq(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """A draw of y is accepted, or refused; a later one of y, or the residual, may output it then, too."""
    # 1. Of one draw, Pr(accepted), Pr(y, accepted), Pr(y, refused).
    p = nodes.p
    q = nodes.q
    number = torch.full_like(nodes.y[:, None], k)
    both, beta = shared(p, q, smallest_rho(p, q, number))
    paid = (1 - (1 - beta) ** number) / positive(beta)
    residual = subtract(p, both, paid.to(p.dtype))
    last = nodes.on(residual) / positive(residual.sum(-1))
    accepted = nodes.on(both)
    miss = 1 - beta.squeeze(1)
    refused = nodes.on(q) - accepted

    # 2. The first draw of y is draw i; y is the output there, at a later draw, or at the end.
    columns = []
    for i in range(k):
        later = sum((miss**j * accepted for j in range(k - i - 1)), torch.zeros_like(miss))
        then = accepted + refused * (later + miss ** (k - i - 1) * last)
        columns.append((miss - refused) ** i * then)
    return torch.stack(columns, 1).to(p.dtype)


def topk(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """Tokens that are drawn for sure carry all of their p. q: any scores."""
    return (most_likely(nodes.q, k) == nodes.y[:, None]) * nodes.on(nodes.p)[:, None]


def greedy(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """k - 1 tokens for sure, and one draw from the rest of q, which is accepted with min(1, p/q')."""
    sure = topk(nodes, k - 1, scheme) * (nodes.on(nodes.q) > 0)[:, None]
    rest = without(nodes.q, most_likely(nodes.q, k - 1))
    last = torch.minimum(nodes.p, rest * scale(rest, torch.ones_like(rest[:, :1])))
    return torch.cat([sure, nodes.on(last)[:, None]], 1)


def spechub(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """With a the most likely token: (y, a), (a, y), (i, a) and (a, j). i and j are sampled where y is a."""
    if k == 1:
        return greedy(nodes, 1, scheme)
    many = nodes.repeated()
    y = nodes.y.repeat_interleave(nodes.samples)[:, None]
    a = many.q.argmax(-1, keepdim=True)
    rest = without(many.q, a)
    other = torch.where(y == a, sample(rest, nodes.generator)[:, None], y)
    absent = rest.sum(-1, keepdim=True) == 0
    other = other.masked_fill(absent, -1)
    at_a = many.q.gather(1, a)
    left = rest.sum(-1, keepdim=True)
    chance = torch.where(y == a, left, many.q.gather(1, other.clamp(min=0)))  # of (other, a)
    columns = []
    for first, second, mass in ((other, a, chance), (a, other, at_a * chance / positive(left))):
        plan = scheme.plan(many.p, many.q, Draws(torch.cat([first, second], 1))).gather(1, y) * mass
        columns.append(torch.cat([plan * (first == y), plan * (second == y)], 1))
    alone = many.p.gather(1, y) * (absent & (y == a))  # q is one-hot
    columns.append(torch.cat([alone, torch.zeros_like(alone)], 1))
    return nodes.averaged(sum(columns, torch.zeros_like(columns[0])))


def is_lp(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    many = nodes.repeated()
    tokens, chance = many.containing(many.q, torch.full_like(many.y[:, None], k), k)
    chosen, selected = select(many.p, many.q, tokens, cast(IsLp, scheme).s)
    return of_selected(nodes, many, chance, Selection(selected, tokens, chosen))


def of_optimal(nodes: Nodes, k: int, scheme: Optimal) -> tuple[Nodes, Tensor, Tensor, "Selection"]:
    """`repeated` nodes with draws, one of which is y: these; the sure tokens; Pr(a draw is y); the selected draw."""
    many = nodes.repeated()
    tops, number, rest = scheme.allot(many.q, torch.full_like(many.y[:, None], k), k)
    tokens, chance = many.containing(rest, number, scheme.most(k))
    draws = scheme.arranged(tops, tokens, nodes.generator)
    return many, tops, chance, Selection(*scheme.selection(many.p, many.q, draws))


def optimal(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    many, tops, chance, of = of_optimal(nodes, k, cast(Optimal, scheme))
    share = of_selected(nodes, many, chance, of)
    sure = nodes.averaged((tops == many.y[:, None]) * many.on(many.p)[:, None])
    return share[:, :k] * ~(sure > 0).any(-1, keepdim=True) + sure


class Selection(NamedTuple):
    """selected: [n, V] the selected draw's distribution. tokens: [n, K]. chosen: [n, K] Pr(it is that draw)."""

    selected: Tensor
    tokens: Tensor
    chosen: Tensor


def of_selected(nodes: Nodes, many: Nodes, chance: Tensor, of: Selection) -> Tensor:
    """[n, K] where one draw is selected, and accepted as a draw of its distribution x: y is with min(p, x) in all.

    So the draws tell only which of them it was, and what the residual adds. many: the `repeated` nodes.
    chance: [., 1] Pr(a draw is y), which these have.
    """
    first = many.first(of.tokens)
    drawn = of.tokens == many.y[:, None]
    accepted, left = one_draft(many.p, of.selected, of.tokens, of.chosen)
    refused = (1 - accepted.sum(-1, keepdim=True)).clamp(min=0)
    residual = refused * many.on(left)[:, None] / positive(left.sum(-1, keepdim=True))
    own = (accepted * drawn).sum(-1, keepdim=True) + TINY
    which = nodes.averaged(first * own)
    total = nodes.averaged(torch.minimum(many.on(many.p), many.on(of.selected))[:, None])
    rest = nodes.averaged(first * residual * chance)
    return total * which / positive(which.sum(-1, keepdim=True)) + rest


FORMS: Mapping[str, Form] = {
    "single": greedy,
    "greedy": greedy,
    "topk": topk,
    "rrs": rrs,
    "rrs-wo": rrs_wo,
    "gumbel": gumbel,
    "kseq": kseq,
    "spechub": spechub,
    "is-lp": is_lp,
    "optimal": optimal,
}
