"""Block verification of a chain.

Sun et al. 2024, Block Verification Accelerates Speculative Decoding, algorithm 2.
"""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.shaping.sampling import TargetDistributions, happens, sample
from treespec.trees.tree import TokenTree
from treespec.verify.laws import normalise
from treespec.verify.scheme import Scheme
from treespec.verify.single import Single
from treespec.verify.walk import Verdict, follow


@final
@dataclass(frozen=True)
class Block:
    """Keeps the longest prefix of a chain whose coin succeeds.

    On average it keeps at least as many tokens as the walk with `single`. With p and q of node i:

        w_0 = 1,  w_(i+1) = min(1, w_i p/q)      p/q at the draw below node i
        R_i = (w_i p - q)+, of mass r_i          q is 0 where a node has no draw
        node i is kept with r_i / (r_i + 1 - w_i), and the next token comes from R_i

    A draw without a node is kept with its weight; no token follows it. The host waits once.
    """

    name: ClassVar[str] = "block"
    scheme: ClassVar[Scheme] = Single()

    def __call__(
        self, tree: TokenTree, p: Tensor | TargetDistributions, generator: torch.Generator
    ) -> Verdict:
        """p: [N, V] probabilities."""
        if tree.drafts is None:
            return follow(tree, sample(p[:], generator))
        p = p[:]
        nodes, tokens = tree.drafts.nodes, tree.drafts.draws.tokens

        # 1. The draw below each node [N] and its law [N, V].
        draw = torch.full_like(tree.tokens, -1).index_copy(0, nodes, tokens[:, 0])
        q = torch.zeros_like(p).index_copy(0, nodes, tree.drafts.q * (tokens >= 0))

        # 2. Each node's weight w and residual R, and the probability to keep it.
        weight = weights(p, q, draw)
        rest = (p * weight[:-1, None].to(p.dtype)).sub_(q).clamp_(min=0)
        mass = rest.sum(-1, dtype=torch.float64)
        keep = mass / (mass + (1 - weight[:-1])).clamp(min=torch.finfo(mass.dtype).tiny)
        keep = torch.cat([keep, weight[-1:]])  # below the last node: a draw without a node

        # 3. The deepest node whose coin succeeds, and a token from its residual.
        kept_here = happens(keep, generator)
        depth = (kept_here * torch.arange(len(keep), device=keep.device)).amax()[None]
        stop = depth.clamp(max=len(p) - 1)
        last = sample(normalise(rest[stop], p[stop]), generator)

        # 4. The path to it, in one copy to the host.
        kept, token, *drawn = torch.cat([depth, last, draw]).tolist()
        return Verdict(list(range(1, len(p)))[:kept], [*drawn[:kept], token][: len(p)])


BLOCK = Block()


def weights(p: Tensor, q: Tensor, draw: Tensor) -> Tensor:
    """[N + 1] float64 weights of the nodes of a chain, and of the draw below the last node.

    p, q: [N, V] probabilities. draw: [N] the token drawn below each node, -1 for none.
    """
    at = draw.clamp(min=0)[:, None]
    odds = (p.gather(1, at).double() / q.gather(1, at).double()).squeeze(1).masked_fill(draw < 0, 0)
    total = odds.log().cumsum(0)
    # A product that is capped at 1 after each factor is, in logarithms, the sum less its largest
    # excess over 0 so far.
    return pad((total - total.cummax(0).values.clamp(min=0)).exp(), (1, 0), value=1)
