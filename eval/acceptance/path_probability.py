"""Ways down a tree along a given text, and how likely a verifier's accepted path follows them.

R_i is Pr(the accepted path has y_1 … y_i), over the target's probability of these tokens. A verifier is
lossless, so a cycle emits exactly y_1 … y_i with R_(i-1) - R_i, over the same. R is the sum over the ways,
the nodes of depth i that may hold y_1 … y_i:

    walk         each step: Pr(draw k is y, and the plan's output)
    traversal    each step: Pr(draw k is y, and all before it are refused); in the end w of the last draw

Of a node that is judged after all nodes below it, w is Pr(it or one of them is accepted), on average over
their draws (Sun et al. 2024, Block Verification, theorem 2; 2505.12398, theorem 3.3): what hangs
below the text, and beside it, has no part.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from treespec.eval.acceptance.acceptance_shares import (
    DRAWS,
    FORMS,
    TINY,
    Nodes,
    in_turn,
    of_optimal,
)
from treespec.trees.static import StaticTree
from treespec.verify.distributions import positive
from treespec.verify.optimal import Optimal
from treespec.verify.scheme import Scheme
from treespec.verify.topk import TopK


@dataclass(frozen=True)
class Way:
    """reach, weight: [n], whose product is the way's part of R."""

    reach: Tensor
    weight: Tensor


def shared(columns: Tensor, nodes: Nodes) -> Tensor:
    """[k, n] in float64, over the target's probability of y. columns: [n, k]."""
    return (columns / positive(nodes.on(nodes.p))[:, None]).double().T


def judged_last(way: Way, nodes: Nodes, parts: tuple[Tensor, Tensor]) -> list[Way]:
    """The ways down k draws that are judged after all nodes below them.

    parts: [n, k] Pr(draw k is y, and all before it are refused), and w of it.
    """
    chances, weights = parts
    columns = zip(shared(chances, nodes), weights.double().T, strict=True)
    return [replace(way, reach=way.reach * chance, weight=w) for chance, w in columns]


def block_optimal(nodes: Nodes, k: int, weight: Tensor, scheme: Optimal) -> tuple[Tensor, Tensor]:
    """As `in_turn`, for `treespec.verify.block_optimal`."""
    # 1. y is the selected draw with x(y): which draw that is.
    nodes = replace(nodes, p=nodes.p * weight)
    many, tops, _, of = of_optimal(nodes, k, scheme)
    own = (of.chosen * (of.tokens == many.y[:, None])).sum(-1, keepdim=True) + TINY
    which = nodes.averaged(many.first(of.tokens) * own)
    x, tops = (part.view(len(nodes.y), nodes.samples, -1)[:, 0] for part in (of.selected, tops))
    at_x = nodes.on(x)[:, None]
    at_p = nodes.on(nodes.p)[:, None]
    chances = at_x * which[:, :k] / positive(which.sum(-1, keepdim=True))

    # 2. Or it is sure, and those before it are refused.
    rest = (nodes.p - x).clamp(min=0)
    taken = rest.gather(1, tops.clamp(min=0)) * (tops >= 0)
    left = rest.sum(-1, keepdim=True) + (1 - weight) - taken.cumsum(-1) + taken
    sure = tops == nodes.y[:, None]
    weights = torch.where(sure, taken / positive(left), at_p / positive(at_x)).clamp(max=1)
    return torch.where(sure, left, chances), weights


@dataclass(frozen=True)
class Pair:
    """A verifier on a tree of fixed shape. scheme: makes the draws. draws: their number, by an inner node's path."""

    verifier: str
    shape: str
    scheme: Scheme
    tree: StaticTree
    draws: Mapping[tuple[int, ...], int]

    @property
    def sure(self) -> bool:
        """Whether the draws are the most likely tokens."""
        return self.scheme.deterministic and self.verifier != "gumbel"

    def count_draws(self, depth: int) -> set[int]:
        """The numbers of draws at the inner nodes of a depth."""
        return {k for path, k in self.draws.items() if len(path) == depth}

    def name_draws(self, greedy: bool) -> str | None:
        """How the draws are made, as `Scheme.drawing` names it. greedy: of temperature 0."""
        if greedy or self.sure:
            return TopK.drawing
        return DRAWS.drawing if self.verifier == "gumbel" else self.scheme.drawing

    def below(
        self, way: Way, nodes: Nodes, k: int, sure: bool, known: dict[tuple[str, int], Tensor]
    ) -> list[Way]:
        """The ways of k draws below a way at n nodes.

        sure: whether the most likely tokens are the draws, as at temperature 0. known: the shares at these nodes, which
        are kept there by verifier and k.
        """
        # 1. Verifiers of whole paths.
        weight = way.weight[:, None].to(nodes.p.dtype)
        if not sure and self.verifier in ("block", "traversal"):
            return judged_last(way, nodes, in_turn(nodes, k, weight))
        if not sure and self.verifier.startswith("block-optimal"):
            found = block_optimal(nodes, k, weight, cast(Optimal, self.scheme))
            return judged_last(way, nodes, found)

        # 2. Others step by step. Of one draw, all schemes make the same.
        alike = k == 1 and self.verifier != "gumbel"
        name = "topk" if sure else "single" if alike else self.verifier
        if (name, k) not in known:
            share = FORMS.get(name, FORMS[self.scheme.name])(nodes, k, self.scheme)
            known[name, k] = shared(share, nodes)
        return [replace(way, reach=way.reach * share) for share in known[name, k]]


def followed(
    pairs: Sequence[Pair], steps: Iterable[tuple[Nodes, Nodes]], greedy: bool
) -> list[Tensor]:
    """Of each pair R [n, D + 1] for 0 … D tokens, D the depth of its tree.

    steps: for the draws of the root, of its children, …: p, q and y behind each of n tokens; and with scores for q, by
    which the most likely tokens are known. greedy: of temperature 0, where these are the draws.
    """
    ways = [dict[tuple[int, ...], Way]() for _ in pairs]
    kept = [list[Tensor]() for _ in pairs]
    for depth, (nodes, scored) in enumerate(steps):
        known: dict[tuple[str, int], Tensor] = {}
        for pair, own, r in zip(pairs, ways, kept, strict=True):
            # 1. The ways one token further.
            if not depth:
                r.append(torch.ones(len(nodes.y), dtype=torch.float64))
                own[()] = Way(r[0], r[0])
            if depth == pair.tree.max_depth:
                continue
            sure = greedy or pair.sure
            for path in [path for path in own if len(path) == depth and path in pair.draws]:
                below = pair.below(
                    own[path], scored if sure else nodes, pair.draws[path], sure, known
                )
                own |= {(*path, i): way for i, way in enumerate(below)}

            # 2. What they keep of the text.
            here = [way for path, way in own.items() if len(path) == depth + 1]
            r.append(sum((way.reach * way.weight for way in here), torch.zeros_like(r[0])))
    return [torch.stack(r, 1) for r in kept]
