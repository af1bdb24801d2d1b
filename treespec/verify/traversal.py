"""Traversal verification of trees drawn without replacement (2505.12398): leaves are judged first.

On a chain it is block verification (Sun et al. 2024, Block Verification Accelerates Speculative
Decoding, algorithm 2).

A node is judged after all nodes below it. Node numbers, and the order of judgement where the
verifier refuses every node but the root:

    0 ─┬─ 1 ─── 3         3, 1, 4, 2, then 0, which is never refused
       └─ 2 ─── 4

The verdict is the path to the first accepted node. A refused child gives its mass back: its parent
continues with the residual of p, from which its next child gets a new chance.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from treespec.shaping.sampling import Coins, sample
from treespec.trees.tree import Drafts, TokenTree
from treespec.verify.distributions import normalise, positive, scale
from treespec.verify.rrs import RRSWithoutReplacement, without_sure
from treespec.verify.scheme import Scheme
from treespec.verify.single import Single
from treespec.verify.topk import TopK
from treespec.verify.walk import (
    Probabilities,
    Verdict,
    Walk,
    children_by_token,
)


@final
@dataclass(frozen=True)
class Traversal:
    """Accepts at least as much as the walk over its scheme, because it looks at whole subtrees.

    At depth 1 it is `rrs-wo`. The weight w of a node is the
    probability to accept it where all nodes below it are refused:

        root      w = 1
        child     w_c = min(1, w p/q)           p, q: the parent's distributions at the child's token
        refused   p <- norm (w p - q)+          the parent, after a child is refused
                  w <- S / (S + 1 - w)          S: the mass of (w p - q)+
                  q <- q without the child's token, normalised

    Trees of the most likely tokens are walked over `topk`.
    A draw without a node is a leaf; no token follows it. The host waits at the start, at each
    refused draw and at the end.
    """

    name: str
    scheme: Scheme
    coupled = False

    def __call__(self, tree: TokenTree, p: Probabilities, generator: torch.Generator) -> Verdict:
        """p: [N, V] probabilities."""
        if tree.drafts is None:
            return Walk(TopK())(tree, p, generator)
        return judge(tree, tree.drafts, p, generator)


TRAVERSAL = Traversal("traversal", RRSWithoutReplacement())
BLOCK = Traversal("block", Single())


def judge(tree: TokenTree, drafts: Drafts, p: Probabilities, generator: torch.Generator) -> Verdict:
    """The verdict on a tree with draws. The host has the numbers that it needs, and a coin for each."""
    # 1. On the device: each inner node's distributions. A sure token's is one-hot, so its q is 1.
    tokens = drafts.draws.tokens
    q_drawn, drawn = without_sure(drafts.q, drafts.draws)
    q_drawn = q_drawn * scale(q_drawn, torch.ones_like(q_drawn[:, :1]))  # [I, V]
    places, sure = tokens.clamp(min=0), drawn < 0  # [I, K]
    inner_p = p[drafts.nodes]
    at_q = q_drawn.gather(1, places).masked_fill(sure, 1)

    # 2. On the host: p/q at the draws, the draws, where they have nodes, a coin for each.
    all_odds: list[list[float]] = (inner_p.gather(1, places).double() / at_q).tolist()
    draws, is_sure = tokens.tolist(), sure.tolist()
    row_of = {node: row for row, node in enumerate(drafts.nodes.tolist())}
    child_of = children_by_token(tree)
    coins = Coins(len(p) + tokens.numel(), generator, p.device)

    def verdict(node: int | None, weight: float) -> Verdict | None:
        """The verdict at or below a draw; None where the draw and all nodes below it are refused.

        node: the draw's node, None if it has none. weight: w of the draw.
        """
        # 1. A draw without a node is a leaf.
        if node is None:
            return Verdict([], []) if coins.happens(weight) else None

        # 2. The children come first. Where all are refused they change the node's p and w.
        row, rest = row_of.get(node), None
        if row is not None:
            below, rest, weight = judge_below(node, row, weight)
            if below:
                return below

        # 3. Then the node itself, with a token from its residual. The root is never refused.
        if node and not coins.happens(weight):
            return None
        own = p[node : node + 1] if row is None else inner_p[row : row + 1]
        residual = own if rest is None else normalise(rest[None].clone(), own)
        return Verdict([], sample(residual, generator).tolist())

    def judge_below(node: int, row: int, weight: float) -> tuple[Verdict | None, Tensor, float]:
        """Judge a node's draws in turn: the first verdict, else the residual [V] and the weight.

        The residual is not normalised. row: the node's row in the tree's drafts.
        """
        rest, q, odds, at = inner_p[row], q_drawn[row], all_odds[row], places[row]
        factor = weight  # rest * factor is w p
        for column, token in enumerate(draws[row]):
            if token < 0:
                continue
            # 1. The child's weight, and the verdict below it.
            child = child_of.get((node, token))
            below = verdict(child, min(factor * odds[column], 1.0))
            if below:
                path = [child, *below.path] if child else []
                return Verdict(path, [token, *below.tokens]), rest, weight

            # 2. It is refused: w p less the distribution of the draw, and q without its token.
            place, rest = at[column : column + 1], rest * factor
            if is_sure[row][column]:
                rest.index_fill_(0, place, 0)
            else:
                rest.sub_(q).clamp_(min=0)
                q = q.index_fill(0, place, 0)
                q = q / positive(q.sum())

            # 3. The new weight, and p/q at the draws to come.
            at_odds = rest[at].double() / q[at].masked_fill(sure[row], 1)
            mass, *odds = torch.cat([rest.sum()[None], at_odds]).tolist()
            factor = 1 / max(mass + (1 - weight), torch.finfo(rest.dtype).tiny)
            weight = mass * factor
        return None, rest, weight

    found = verdict(0, 1.0)
    assert found
    return found
