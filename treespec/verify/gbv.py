"""Greedy multi-path block verification (Thomas and Pal 2026, 2602.16961): one draw a node is selected, then `block`.

The paper has K independent paths, from which it selects one. Here a tree has independent draws at each node. Of these
the one with the largest p/q is selected, then one below it, and so on. The distribution r of the selected is known:

    tokens by p/q       a     b     c           of K = 2 draws
    q                   .5    .3    .2
    q up to it, U       .5    .8    1           r(x) = U^K - L^K, L: q before it
    r                   .25   .39   .36

So the path is a chain of single draws from r, which block verification answers. Independent paths are the tree
`delayed:0xKxD`; of equal beginnings the first alone goes on here.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from treespec.trees.tree import Drafts, Draws, TokenTree
from treespec.verify.distributions import positive
from treespec.verify.rrs import RRS
from treespec.verify.topk import TopK
from treespec.verify.traversal import judge, judge_at_once
from treespec.verify.walk import (
    Judging,
    Probabilities,
    Verdict,
    Walk,
    children_by_token,
    drawn_at,
)


def select(p: Tensor, q: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """[B, V] the distribution of the selected draw, and its token [B, 1]. tokens: [B, K] independent draws from q.

    Of equal p/q the larger token comes later. r is q times the sum of U^a L^b over a + b = K - 1.
    """
    order = (p / positive(q)).argsort(dim=-1, stable=True)
    mass = q.gather(1, order).double()
    mass = mass / positive(mass.sum(-1, keepdim=True))
    high = mass.cumsum(-1)
    low, number = (high - mass).clamp(min=0), (tokens >= 0).sum(-1, keepdim=True)
    power = sum(
        (
            (a < number) * high**a * low ** (number - 1 - a).clamp(min=0)
            for a in range(tokens.shape[1])
        ),
        torch.zeros_like(high),
    )
    r = torch.empty_like(q).scatter_(1, order, (mass * power).to(q.dtype))
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(q.shape[1], device=q.device).expand_as(order)
    )
    best = rank.gather(1, tokens.clamp(min=0)).masked_fill(tokens < 0, -1).argmax(-1, keepdim=True)
    return r, tokens.gather(1, best)


@final
@dataclass(frozen=True)
class GreedyBlock:
    """Trees of the most likely tokens are walked over `topk`."""

    name, scheme, coupled = "gbv", RRS(), False

    def __call__(self, tree: TokenTree, p: Probabilities, generator: torch.Generator) -> Verdict:
        """p: [N, V] probabilities."""
        if tree.drafts is None:
            return Walk(TopK())(tree, p, generator)
        # 1. The selected draws along one path.
        drafts, child_of, node, found = tree.drafts, children_by_token(tree), 0, []
        row_of = {node: row for row, node in enumerate(drafts.nodes.tolist())}
        while (row := row_of.get(node)) is not None:
            tokens = drawn_at(row, drafts.draws).tokens
            found.append((node, *select(p[node : node + 1], drafts.q[row : row + 1], tokens)))
            node = child_of.get((node, int(found[-1][-1])), -1)

        # 2. Block verification of it.
        nodes, r, token = zip(*found, strict=True)
        chain = Drafts(torch.tensor(nodes), torch.cat(r), Draws(torch.cat(token)))
        return judge(tree, chain, p, generator)

    def at_once(self, tree: TokenTree, p: Probabilities, generator: torch.Generator) -> Judging:
        """p: [N, V] probabilities."""
        if tree.drafts is None:
            return Walk(TopK()).at_once(tree, p, generator)
        drafts = tree.drafts
        r, tokens = select(p[drafts.nodes], drafts.q, drafts.draws.tokens)
        chain = Drafts(drafts.nodes, r, Draws(tokens))
        return judge_at_once(tree, chain, p[:], generator)


GBV = GreedyBlock()
