"""Block verification of a chain (Sun et al. 2024, Block Verification Accelerates Speculative
Decoding, algorithm 2).
"""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.sampling import TargetLaws, sample
from treespec.trees.tree import TokenTree
from treespec.verify.laws import check, normalise
from treespec.verify.scheme import Scheme
from treespec.verify.single import Single
from treespec.verify.walk import Verdict, follow


@final
@dataclass(frozen=True)
class Block:
    """Keeps the longest prefix of a chain whose coin succeeds: never less, on average, than the
    walk with `single`.

    Node i has weight w_i = min(1, w_(i-1) p/q), leaves (w_i p - q)+, of mass r_i, and is kept with
    r_i / (r_i + 1 - w_i); where nothing is drawn q is 0. A draw without a node is kept with its
    weight. The host waits once. Raises InputError where a node has two draws.
    """

    name: ClassVar[str] = "block"
    scheme: ClassVar[Scheme] = Single()
    paced: ClassVar[bool] = False

    def __call__(
        self, tree: TokenTree, p: Tensor | TargetLaws, generator: torch.Generator
    ) -> Verdict:
        """p: [N, V] probabilities."""
        if tree.drafts is None:
            return follow(tree, sample(p[:], generator))
        p = p[:]
        nodes, tokens = tree.drafts.nodes, tree.drafts.draws.tokens
        check(self.scheme, tree.drafts.q, tokens.shape[1])
        draw = torch.full_like(tree.tokens, -1).index_copy(
            0, nodes, tokens[:, 0]
        )  # [N] below each node
        q = torch.zeros_like(p).index_copy(0, nodes, tree.drafts.q * (tokens >= 0))  # [N, V]
        weight = weights(p, q, draw)
        rest = (p * weight[:-1, None].to(p.dtype)).sub_(q).clamp_(min=0)
        mass = rest.sum(-1, dtype=torch.float64)
        keep = mass / (mass + (1 - weight[:-1])).clamp(min=torch.finfo(mass.dtype).tiny)
        keep = torch.cat([keep, weight[-1:]])  # beyond the last node: a draw without a node
        coins = torch.rand(len(keep), generator=generator, dtype=keep.dtype, device=keep.device)
        depth = ((coins < keep) * torch.arange(len(keep), device=keep.device)).amax()[None]
        stop = depth.clamp(max=len(p) - 1)
        last = sample(normalise(rest[stop], p[stop]), generator)
        kept, token, *drawn = torch.cat([depth, last, draw]).tolist()
        return Verdict(list(range(1, len(p)))[:kept], [*drawn[:kept], token][: len(p)])


def weights(p: Tensor, q: Tensor, draw: Tensor) -> Tensor:
    """[N + 1] float64 weights of the nodes of a chain, and of what is drawn below the last.

    draw: [N], -1 is none.
    """
    at = draw.clamp(min=0)[:, None]
    odds = (p.gather(1, at).double() / q.gather(1, at).double()).squeeze(1).masked_fill(draw < 0, 0)
    total = odds.log().cumsum(0)
    # A product capped at 1 at every step is, in logarithms, a sum less the most it has exceeded 0 so far.
    return pad((total - total.cummax(0).values.clamp(min=0)).exp(), (1, 0), value=1)
