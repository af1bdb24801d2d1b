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
from typing import cast

import torch
from torch import Tensor

from treespec.shaping.sampling import sample, uniforms
from treespec.trees.tree import Draws
from treespec.verify.distributions import (
    independent,
    keep_first,
    most_likely,
    normalise,
    positive,
    scale,
    subtract,
    without,
)
from treespec.verify.kseq import shared, smallest_rho
from treespec.verify.optimal import Optimal
from treespec.verify.scheme import Scheme, check

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
        """Each node so many times."""
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
        y, column = self.y[:, None], torch.arange(width, device=q.device)
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
    left, q, reach, columns = nodes.p, nodes.q, torch.ones_like(nodes.p[:, 0]), []
    for _ in range(k):
        both = torch.minimum(left, q)
        columns.append(reach * nodes.on(both))
        reach = reach * (1 - both.sum(-1))
        left = normalise((left - q).clamp_(min=0), left)
    return torch.stack(columns, 1)


def rrs_wo(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """The refused tokens change the draws after them: all but the last of them are sampled.

    The next draw is y with min(left(y), q(y) / (1 - q(x))) where x was refused just before, and x was
    with (q - left)+.
    """
    left, q, reach, columns = nodes.p, nodes.q, torch.ones_like(nodes.p[:, 0]), []
    columns.append(nodes.on(torch.minimum(left, q)))
    y = nodes.y
    for i in range(1, k):
        # 1. The next draw, summed over the token refused before it.
        refused = (q - left).clamp_(min=0)
        left = normalise((left - q).clamp_(min=0), left)
        ours, rest = (masses.gather(1, y[:, None]) for masses in (left, q))
        others = (1 - q).scatter(
            1, top := q.argmax(-1, keepdim=True), without(q, top).sum(-1, keepdim=True)
        )
        both = torch.minimum(ours, rest / positive(others))
        column = reach * (refused * both).sum(-1)
        columns.append(column.view(len(nodes.y), -1).mean(1))
        if i == k - 1:
            break

        # 2. That token, sampled: several times at first.
        if len(q) == len(nodes.y):
            many = (
                part.repeat_interleave(nodes.samples, 0) for part in (left, q, reach, refused, y)
            )
            left, q, reach, refused, y = many
        reach = reach * refused.sum(-1)
        token = sample(refused, nodes.generator)[:, None]
        q = without(q, token.masked_fill(token >= q.shape[1], -1))
        q = q * scale(q, torch.ones_like(q[:, :1]))
    return torch.stack(columns, 1)


def kseq(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """A draw of y is accepted, or refused; a later one of y, or the residual, may output it then, too."""
    # 1. In float64: of one draw, Pr(accepted), Pr(y, accepted), Pr(y, refused).
    p, q = nodes.p.double(), nodes.q.double()
    number = torch.full_like(nodes.y[:, None], k)
    rho = smallest_rho(p, q, number)
    both, beta = shared(p, q, rho)
    paid = (1 - (1 - beta) ** number) / positive(beta)
    residual = subtract(p, both, paid)
    last = nodes.on(residual * scale(residual, torch.ones_like(beta)))
    accepted, miss = nodes.on(both), 1 - beta.squeeze(1)
    refused = nodes.on(q) - accepted

    # 2. The first draw of y is draw i; y is the output there, at a later draw, or at the end.
    columns = []
    for i in range(k):
        later = sum((miss**j * accepted for j in range(k - i - 1)), torch.zeros_like(miss))
        then = accepted + refused * (later + miss ** (k - i - 1) * last)
        columns.append((miss - refused) ** i * then)
    return torch.stack(columns, 1).to(nodes.p.dtype)


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
    many, y = nodes.repeated(), nodes.y.repeat_interleave(nodes.samples)[:, None]
    a = many.q.argmax(-1, keepdim=True)
    rest = without(many.q, a)
    other = torch.where(y == a, sample(rest, nodes.generator)[:, None], y)
    absent = rest.sum(-1, keepdim=True) == 0
    other = other.masked_fill(absent, -1)
    at_a, left = many.q.gather(1, a), rest.sum(-1, keepdim=True)
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
    plan = scheme.plan(many.p, many.q, Draws(tokens))
    return nodes.averaged(many.first(tokens) * many.on(plan)[:, None] * chance)


def optimal(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    scheme = cast(Optimal, scheme)
    many = nodes.repeated()
    tops, number, rest = scheme.allot(many.q, torch.full_like(many.y[:, None], k), k)
    tokens, chance = many.containing(rest, number, scheme.most(k))
    draws = scheme.arranged(tops, tokens, nodes.generator)
    plan = many.on(scheme.plan(many.p, many.q, draws))[:, None] * chance
    sure = (tops == many.y[:, None]) * many.on(many.p)[:, None]
    return nodes.averaged(
        many.first(draws.tokens[:, :k]) * plan * ~sure.any(-1, keepdim=True) + sure
    )


FORMS: Mapping[str, Form] = {
    "single": greedy,
    "greedy": greedy,
    "topk": topk,
    "rrs": rrs,
    "rrs-wo": rrs_wo,
    "kseq": kseq,
    "spechub": spechub,
    "is-lp": is_lp,
    "optimal": optimal,
}


def carried(scheme: Scheme, nodes: Nodes, k: int) -> Tensor:
    """[n, k] Pr(the output is y, and draw i is the first draw of y). Raises InputError as `check`."""
    check(scheme, k)
    return FORMS[scheme.name](nodes, k, scheme)
