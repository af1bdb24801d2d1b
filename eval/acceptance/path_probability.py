"""Ways down a tree along a given text, and how likely a verifier's accepted path follows each of them.

R_i is Pr(the accepted path has y_1 … y_i), over the target's probability of these tokens. A verifier is
lossless, so a cycle emits exactly y_1 … y_i with R_(i-1) - R_i, over the same. R is the sum over the ways,
the nodes of depth i that may hold y_1 … y_i:

    walk         each step: Pr(draw k is y, and the plan's output)
    traversal    each step: Pr(draw k is y, and all before it are refused); in the end w of the last draw

Of a node that is judged after all nodes below it, w is Pr(it or one of them is accepted), on average over
their draws (Sun et al. 2024, Block Verification, theorem 2; 2505.12398, theorem 3.3): siblings and
deeper nodes do not change this probability.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from treespec.eval.acceptance.acceptance_shares import (
    MIN_SELECTION_MASS,
    RRS_WITHOUT_REPLACEMENT,
    SHARES_BY_SCHEME,
    Nodes,
    accept_in_turn,
    draw_for_optimal,
)
from treespec.trees.static import StaticTree
from treespec.verify.distributions import clamp_positive
from treespec.verify.optimal import Optimal
from treespec.verify.scheme import Scheme
from treespec.verify.topk import TopK


@dataclass(frozen=True)
class PathTerm:
    """A node that may hold the next tokens of a text. reach, weight: [n]; their product is its part of R."""

    reach: Tensor
    weight: Tensor


def share_columns(columns: Tensor, nodes: Nodes) -> Tensor:
    """Divide probabilities [n, k] by the target's probability of y; [k, n] in float64."""
    return (columns / clamp_positive(nodes.gather_mass(nodes.p))[:, None]).double().T


def list_leaf_first_ways(
    way: PathTerm, nodes: Nodes, parts: tuple[Tensor, Tensor]
) -> list[PathTerm]:
    """Follow k draws that are judged after all nodes below them: a way for each.

    parts: [n, k] Pr(draw k is y, and all before it are refused), and w of it.
    """
    chances, weights = parts
    below = []
    for chance, weight in zip(share_columns(chances, nodes), weights.double().T, strict=True):
        below.append(PathTerm(way.reach * chance, weight))
    return below


def weigh_block_optimal(
    nodes: Nodes, k: int, weight: Tensor, scheme: Optimal
) -> tuple[Tensor, Tensor]:
    """Follow the draws of `treespec.verify.block_optimal`; as `accept_in_turn`."""
    # 1. y is the selected draw with x(y): which draw that is.
    nodes = replace(nodes, p=nodes.p * weight)
    optimal = draw_for_optimal(nodes, k, scheme)
    many = optimal.samples
    tokens = optimal.selection.tokens
    chosen = (optimal.selection.chosen * (tokens == many.y[:, None])).sum(
        -1, keepdim=True
    ) + MIN_SELECTION_MASS
    which = nodes.average_samples(many.mark_first_match(tokens) * chosen)
    x = optimal.selection.selected.view(len(nodes.y), nodes.samples, -1)[:, 0]
    tops = optimal.sure_tokens.view(len(nodes.y), nodes.samples, -1)[:, 0]
    at_x = nodes.gather_mass(x)[:, None]
    at_p = nodes.gather_mass(nodes.p)[:, None]
    chances = at_x * which[:, :k] / clamp_positive(which.sum(-1, keepdim=True))

    # 2. Or it is sure, and those before it are refused.
    rest = (nodes.p - x).clamp(min=0)
    taken = rest.gather(1, tops.clamp(min=0)) * (tops >= 0)
    left = rest.sum(-1, keepdim=True) + (1 - weight) - taken.cumsum(-1) + taken
    sure = tops == nodes.y[:, None]
    weights = torch.where(sure, taken / clamp_positive(left), at_p / clamp_positive(at_x)).clamp(
        max=1
    )
    return torch.where(sure, left, chances), weights


@dataclass(frozen=True)
class Pair:
    """A verifier on a tree of fixed shape.

    shape: as `--tree` names the tree. scheme: makes the draws. draws: their number by the path of an inner node.
    """

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
        if self.verifier == "gumbel":
            return RRS_WITHOUT_REPLACEMENT.drawing
        return self.scheme.drawing

    def list_ways_below(
        self, way: PathTerm, nodes: Nodes, k: int, sure: bool, shares: dict[tuple[str, int], Tensor]
    ) -> list[PathTerm]:
        """Follow k draws below a way at n nodes: a way for each.

        Args:
            way: leads to the nodes.
            nodes: their p, q and y.
            k: number of draws at each.
            sure: whether the most likely tokens are the draws, as at temperature 0.
            shares: [k, n] of these nodes by verifier and k, kept here for pairs that have equal ones.
        """
        # 1. Verifiers of whole paths.
        weight = way.weight[:, None].to(nodes.p.dtype)
        if not sure and self.verifier in ("block", "traversal"):
            return list_leaf_first_ways(way, nodes, accept_in_turn(nodes, k, weight))
        if not sure and self.verifier.startswith("block-optimal"):
            parts = weigh_block_optimal(nodes, k, weight, cast(Optimal, self.scheme))
            return list_leaf_first_ways(way, nodes, parts)

        # 2. Others step by step. Of one draw, all schemes but gumbel make the same.
        name = self.verifier
        if sure:
            name = "topk"
        elif k == 1 and self.verifier != "gumbel":
            name = "single"
        if (name, k) not in shares:
            share = SHARES_BY_SCHEME.get(name, SHARES_BY_SCHEME[self.scheme.name])(
                nodes, k, self.scheme
            )
            shares[name, k] = share_columns(share, nodes)
        return [PathTerm(way.reach * share, way.weight) for share in shares[name, k]]


@dataclass
class FollowedPair:
    """How far a pair's cycles follow a text, level by level of its tree.

    ways: by the path of a node that may hold the next tokens of the text. kept: [n] R of 0, 1, … tokens.
    """

    pair: Pair
    ways: dict[tuple[int, ...], PathTerm]
    kept: list[Tensor]

    def follow_level(
        self, nodes: Nodes, is_greedy: bool, scored: Nodes, shares: dict[tuple[str, int], Tensor]
    ) -> None:
        """Follow the draws of the next level.

        Args:
            nodes: p, q and y after each token of the text.
            is_greedy: whether the temperature is 0, where the draws are the most likely tokens.
            scored: `nodes` with scores for q, which tell the most likely tokens.
            shares: those of `Pair.score_children` at this level.
        """
        # 1. The ways one token further.
        depth = len(self.kept) - 1
        sure = is_greedy or self.pair.sure
        if sure:
            nodes = scored
        total = torch.zeros_like(self.kept[0])
        for path in list(self.ways):
            if len(path) == depth and path in self.pair.draws:
                below = self.pair.list_ways_below(
                    self.ways[path], nodes, self.pair.draws[path], sure, shares
                )
                # 2. What they keep of the text.
                for i, way in enumerate(below):
                    self.ways[(*path, i)] = way
                    total = total + way.reach * way.weight
        self.kept.append(total)


def follow_pairs(
    pairs: Sequence[Pair], steps: Iterable[tuple[Nodes, Nodes]], greedy: bool
) -> list[Tensor]:
    """Follow a text of n tokens down the trees of pairs.

    Args:
        pairs: verifiers on trees of fixed shape.
        steps: for the draws of the root, of its children, …: p, q and y after each of the n tokens; and the same with
            scores for q, which tell the most likely tokens.
        greedy: whether the temperature is 0, where these are the draws.

    Returns:
        R [n, D + 1] of each pair, for 0 … D tokens, D the depth of its tree.
    """
    followed_pairs = list[FollowedPair]()
    for depth, (nodes, scored) in enumerate(steps):
        if depth == 0:
            ones = torch.ones(len(nodes.y), dtype=torch.float64)
            followed_pairs = [
                FollowedPair(pair, {(): PathTerm(ones, ones)}, [ones]) for pair in pairs
            ]
        shares: dict[tuple[str, int], Tensor] = {}
        for followed_pair in followed_pairs:
            if depth < followed_pair.pair.tree.max_depth:
                followed_pair.follow_level(nodes, greedy, scored, shares)
    return [torch.stack(followed_pair.kept, 1) for followed_pair in followed_pairs]
