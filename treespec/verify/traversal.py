"""Traversal verification of trees drawn without replacement (2505.12398): leaves first, and upwards
where refused.
"""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from treespec.sampling import TargetLaws, sample
from treespec.trees.tree import TokenTree
from treespec.verify.laws import check, normalise
from treespec.verify.rrs_wo import RRSWithoutReplacement, without_sure
from treespec.verify.scheme import Scheme
from treespec.verify.walk import Verdict, follow


@final
@dataclass(frozen=True)
class Traversal:
    """Judges each node after all that is below it: on a chain it is block verification, at depth 1
    `rrs-wo`.

    A child has weight w_c = min(1, w p/q), the root 1. A node below which all is refused is kept
    with its weight. Where it is refused its parent goes on with p <- norm (w p - q)+, w <- S / (S +
    1 - w), S the mass of (w p - q)+, and q without it. A draw without a node is a leaf that nothing
    follows. The host waits at the start, at each refused draw and at the end.
    """

    name: ClassVar[str] = "traversal"
    scheme: ClassVar[Scheme] = RRSWithoutReplacement()
    paced: ClassVar[bool] = False

    def __call__(
        self, tree: TokenTree, p: Tensor | TargetLaws, generator: torch.Generator
    ) -> Verdict:
        """p: [N, V] probabilities."""
        if tree.drafts is None:
            return follow(tree, sample(p[:], generator))
        laws, tokens, nodes = tree.drafts.q, tree.drafts.draws.tokens, tree.drafts.nodes
        check(self.scheme, laws, tokens.shape[1])
        laws, drawn = without_sure(laws, tree.drafts.draws)
        at, sure = tokens.clamp(min=0), drawn < 0  # of a token for sure the law is one-hot
        inner = p[nodes]
        odds = (inner.gather(1, at).double() / laws.gather(1, at).masked_fill(sure, 1)).tolist()
        draws, is_sure, totals = tokens.tolist(), sure.tolist(), laws.sum(-1).tolist()
        row_of = {node: row for row, node in enumerate(nodes.tolist())}
        child_of: dict[tuple[int, int], int] = {}
        for node, (parent, token) in enumerate(
            torch.stack([tree.parents, tree.tokens]).mT.tolist()
        ):
            child_of.setdefault((parent, token), node)
        uniform = torch.rand(
            len(p) + tokens.numel(), generator=generator, dtype=torch.float64, device=p.device
        )
        coins = iter(uniform.tolist())

        def keep(node: int | None, weight: float) -> Verdict | None:
            """The verdict below a draw; None where the draw and all below it are refused.

            node: the draw's; None for a draw without a node. weight: the draw's.
            """
            if node is None:
                return Verdict([], []) if next(coins) < weight else None
            row, scale = row_of.get(node), weight
            own = p[node] if row is None else inner[row]
            law = own  # law * scale is w p
            if row is not None:
                q, total, chances = laws[row], totals[row], odds[row]
                for k, token in enumerate(draws[row]):
                    if token < 0:
                        continue
                    child = child_of.get((node, token))
                    chance = chances[k] if is_sure[row][k] else chances[k] * total
                    below = keep(child, min(1.0, scale * chance))
                    if below:
                        return Verdict(
                            [child, *below.path] if child else [], [token, *below.tokens]
                        )
                    if is_sure[row][k]:
                        law = (law * scale).index_fill_(0, at[row, k : k + 1], 0)
                    else:
                        law = (law * scale).sub_(q, alpha=1 / total).clamp_(min=0)
                        q = q.index_fill(0, at[row, k : k + 1], 0)
                    sums = torch.stack([law.sum(), q.sum().clamp(min=torch.finfo(q.dtype).tiny)])
                    odd = law[at[row]].double() / q[at[row]].masked_fill(sure[row], 1)
                    left, total, *chances = torch.cat([sums, odd]).tolist()
                    scale = 1 / max(left + (1 - weight), torch.finfo(law.dtype).tiny)
                    weight = left * scale
            if node == 0 or next(coins) < weight:
                return Verdict(
                    [], sample(normalise(law[None].clone(), own[None]), generator).tolist()
                )
            return None

        verdict = keep(0, 1.0)
        assert verdict
        return verdict
