"""Compute how likely a verifier's accepted path follows a given text down a tree.

R_i is Pr(the accepted path begins with y_1 … y_i), divided by the target's probability of these tokens. A cycle of a
lossless verifier emits exactly y_1 … y_i with R_(i-1) - R_i, divided by the same. R_i is a sum over the nodes of depth
i that may hold y_1 … y_i; such a node is called a way (`PathTerm`). Its part is a product along its path:

    walk         each step: Pr(draw k is y, and y is the plan's output)
    traversal    each step: Pr(draw k is y, and all earlier draws are refused); after the last step w of that draw

Five nodes, two draws a node; the text has y_1 and y_2 next:

    root -- draw 1 -- draw 1         R_1: two ways, draw 1 and draw 2 of the root
       |        `---- draw 2         R_2: two ways, the children of draw 1
       `--- draw 2

w of a node that is judged after all nodes below it is Pr(it or one of them is accepted), on average over their draws.
Siblings and deeper nodes do not change this probability (Sun et al. 2024, Block Verification, theorem 2; Traversal
Verification, 2505.12398, theorem 3.3).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.draft.auto.cost import CycleCost
from treespec.eval.acceptance.acceptance_shares import (
    MIN_SELECTION_MASS,
    RRS_WITHOUT_REPLACEMENT,
    SHARES_BY_SCHEME,
    Nodes,
    accept_in_turn,
    draw_for_optimal,
    share_greedy,
    share_topk,
)
from treespec.eval.intervals import Array
from treespec.trees.static import StaticTree
from treespec.trees.tree import Draws
from treespec.verify.distributions import clamp_positive
from treespec.verify.optimal import Optimal
from treespec.verify.scheme import Scheme
from treespec.verify.topk import TopK


def share_by_samples(nodes: Nodes, k: int, scheme: Scheme) -> Tensor:
    """Compute the shares [n, k] of any scheme by samples of its draws: the plan's mass on y, if a draw is y.

    Independent draws are sampled given that one of them is y.
    """
    samples = nodes.repeat_samples()
    draws = scheme.draw(samples.q, k, nodes.generator)
    chance = torch.ones_like(samples.p[:, :1])
    has_only_tokens = draws.sure is None and draws.uniforms is None
    if has_only_tokens and scheme.drawing == "with replacement":
        number = torch.full_like(samples.y[:, None], k)
        tokens, chance = samples.draw_containing_token(samples.q, number, k)
        draws = Draws(tokens)
    plan = scheme.plan(samples.p, samples.q, draws)
    mass = chance * samples.gather_mass(plan)[:, None]
    columns = samples.mark_first_match(draws.tokens) * mass
    return nodes.average_samples(pad(columns, (0, k - columns.shape[1])))


LEAF_FIRST_VERIFIERS = {
    "block",
    "traversal",
    "block-optimal",
}  # judge a node after the nodes below it


@dataclass(frozen=True)
class PathTerm:
    """A way: a node that may hold the next tokens of a text, at each of n positions. Its part of R is reach * weight.

    Attributes:
        reach: [n] product of the steps' probabilities, each divided by the target's probability of the token.
        weight: [n] w of the node; 1 for verifiers that walk.
    """

    reach: Tensor
    weight: Tensor


def share_columns(columns: Tensor, nodes: Nodes) -> Tensor:
    """Divide probabilities [n, k] by the target's probability of y; [k, n] float64."""
    return (columns / clamp_positive(nodes.gather_mass(nodes.p))[:, None]).double().T


def list_leaf_first_ways(
    way: PathTerm, nodes: Nodes, chances_and_weights: tuple[Tensor, Tensor]
) -> list[PathTerm]:
    """Extend a way by each of k draws that are judged after all nodes below them.

    chances_and_weights: [n, k] Pr(draw k is y, and all earlier draws are refused), and [n, k] w of draw k.
    """
    chances, weights = chances_and_weights
    ways_below = []
    for chance, weight in zip(share_columns(chances, nodes), weights.double().T, strict=True):
        ways_below.append(PathTerm(way.reach * chance, weight))
    return ways_below


def weigh_block_optimal(
    nodes: Nodes, k: int, weight: Tensor, scheme: Optimal
) -> tuple[Tensor, Tensor]:
    """Compute what `accept_in_turn` returns, for the draws of `treespec.verify.block_optimal`."""
    # 1. The selected draw is y with probability x(y); the samples tell which draw that is.
    nodes = replace(nodes, p=nodes.p * weight)
    optimal = draw_for_optimal(nodes, k, scheme)
    samples = optimal.samples
    tokens = optimal.selection.tokens
    selection_weights = (optimal.selection.chosen * (tokens == samples.y[:, None])).sum(
        -1, keepdim=True
    ) + MIN_SELECTION_MASS
    draw_weights = nodes.average_samples(samples.mark_first_match(tokens) * selection_weights)
    x = optimal.selection.selected.view(len(nodes.y), nodes.samples, -1)[:, 0]
    tops = optimal.sure_tokens.view(len(nodes.y), nodes.samples, -1)[:, 0]
    x_of_y = nodes.gather_mass(x)[:, None]
    p_of_y = nodes.gather_mass(nodes.p)[:, None]
    chances = x_of_y * draw_weights[:, :k] / clamp_positive(draw_weights.sum(-1, keepdim=True))

    # 2. Or y is a certain token, and the tokens before it are refused.
    residual = (nodes.p - x).clamp(min=0)
    certain_residual = residual.gather(1, tops.clamp(min=0)) * (tops >= 0)
    remaining = (
        residual.sum(-1, keepdim=True)
        + (1 - weight)
        - certain_residual.cumsum(-1)
        + certain_residual
    )
    is_certain = tops == nodes.y[:, None]
    weights = torch.where(
        is_certain, certain_residual / clamp_positive(remaining), p_of_y / clamp_positive(x_of_y)
    ).clamp(max=1)
    return torch.where(is_certain, remaining, chances), weights


@dataclass(frozen=True)
class Pair:
    """A verifier on a tree of fixed shape.

    Attributes:
        verifier: as `--verifier` names it.
        shape: as `--tree` names the tree.
        scheme: makes the draws.
        tree: the tree.
        draws: path of an inner node -> number of draws there.
    """

    verifier: str
    shape: str
    scheme: Scheme
    tree: StaticTree
    draws: Mapping[tuple[int, ...], int]

    answers = 0  # its figures follow given texts

    @property
    def fixed(self) -> "Pair":
        """The verifier on a tree of fixed shape: this pair."""
        return self

    def predict_cycle_seconds(self, costs: Mapping[int, CycleCost]) -> Array:
        """Predict the seconds [B] of a cycle. costs: batch size -> cost model."""
        seconds = []
        for cost in costs.values():
            seconds.append(cost.predict_cycle(self.tree.size, self.tree.max_depth, len(self.draws)))
        return np.array(seconds, dtype=np.float64)

    @property
    def name(self) -> str:
        """The verifier's name without its options."""
        return self.verifier.partition(":")[0]

    @property
    def table_name(self) -> str:
        """The name that treespec's tables have for the draws; "" for a verifier of another package."""
        if self.name in LEAF_FIRST_VERIFIERS:
            return self.scheme.name
        if self.name in SHARES_BY_SCHEME:
            return self.name
        return ""

    @property
    def sure(self) -> bool:
        """Whether the draws are the most likely tokens."""
        return self.scheme.takes_most_likely and self.verifier != "gumbel"

    @property
    def ranks(self) -> bool:
        """Whether the draws are a function of scores, which need no truncation."""
        return self.scheme.deterministic and self.verifier != "gumbel"

    def count_draws(self, depth: int) -> set[int]:
        """Collect the different numbers of draws at the inner nodes of a depth."""
        return {k for path, k in self.draws.items() if len(path) == depth}

    def name_draws(self, greedy: bool) -> str | None:
        """Name how the draws are made, as `Scheme.drawing` does. greedy: whether the temperature is 0."""
        if greedy or self.sure:
            return TopK.drawing
        if self.verifier == "gumbel":
            return RRS_WITHOUT_REPLACEMENT.drawing
        return self.scheme.drawing

    def list_ways_below(
        self, way: PathTerm, nodes: Nodes, k: int, sure: bool, shares: dict[tuple[str, int], Tensor]
    ) -> list[PathTerm]:
        """Extend a way by each of the k draws below it.

        Args:
            way: the way, at n positions of the text.
            nodes: p, q and y at its node.
            k: number of draws there.
            sure: whether the draws are the most likely tokens, as at temperature 0.
            shares: cache of (verifier, k) -> shares [k, n] of these nodes; pairs with equal draws share it.

        Returns:
            k ways.
        """
        # 1. Verifiers of whole paths.
        weight = way.weight[:, None].to(nodes.p.dtype)
        if not sure and self.name in ("block", "traversal"):
            return list_leaf_first_ways(way, nodes, accept_in_turn(nodes, k, weight))
        if not sure and self.name == "block-optimal":
            chances_and_weights = weigh_block_optimal(nodes, k, weight, cast(Optimal, self.scheme))
            return list_leaf_first_ways(way, nodes, chances_and_weights)

        # 2. Verifiers that walk. With one draw, all of treespec's schemes but gumbel are the same.
        name = self.verifier
        form = SHARES_BY_SCHEME.get(self.table_name, share_by_samples)
        if sure:
            name = "topk"
            form = share_topk
        elif k == 1 and self.table_name and name != "gumbel":
            name = "single"
            form = share_greedy
        if (name, k) not in shares:
            share = form(nodes, k, self.scheme)
            shares[name, k] = share_columns(share, nodes)
        return [PathTerm(way.reach * share, way.weight) for share in shares[name, k]]


def find_inner_nodes(tree: StaticTree) -> set[tuple[int, ...]]:
    """Find the paths of the nodes that have children."""
    return {path[:-1] for path in tree.paths[1:]}


def build_pair(verifier: str, shape: str, scheme: Scheme, tree: StaticTree) -> Pair:
    """Build the pair of a verifier and a tree of fixed shape. Arguments as the attributes of `Pair`."""
    draws = {path: tree.count_draws(path) for path in find_inner_nodes(tree)}
    return Pair(verifier, shape, scheme, tree, draws)


@dataclass
class FollowedPair:
    """How far a pair's cycles follow a text, level by level of its tree.

    Attributes:
        pair: verifier and tree.
        ways: path of a node -> its way.
        kept: R [n] of 0, 1, … tokens, as far as the levels are followed.
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
            is_greedy: whether the temperature is 0; then the draws are the most likely tokens.
            scored: `nodes` with untruncated draft probabilities for q, which rank the most likely tokens.
            shares: cache of `Pair.list_ways_below` at this level.
        """
        # 1. Extend each way of the last level.
        depth = len(self.kept) - 1
        sure = is_greedy or self.pair.sure
        if sure or self.pair.ranks:
            nodes = scored
        kept = torch.zeros_like(self.kept[0])
        for path in list(self.ways):
            if len(path) == depth and path in self.pair.draws:
                ways_below = self.pair.list_ways_below(
                    self.ways[path], nodes, self.pair.draws[path], sure, shares
                )
                # 2. Sum their parts of R.
                for i, way in enumerate(ways_below):
                    self.ways[(*path, i)] = way
                    kept = kept + way.reach * way.weight
        self.kept.append(kept)


def follow_pairs(
    pairs: Sequence[Pair], steps: Iterable[tuple[Nodes, Nodes]], greedy: bool
) -> list[Tensor]:
    """Follow a text of n tokens down the trees of pairs.

    Args:
        pairs: verifiers on trees of fixed shape.
        steps: for each level of the trees (nodes, scored): p, q and y after each of the n tokens; and the same with
            untruncated draft probabilities for q, which rank the most likely tokens.
        greedy: whether the temperature is 0; then the draws are the most likely tokens.

    Returns:
        R [n, D + 1] of each pair, for 0 … D tokens; D is the depth of its tree.
    """
    followed_pairs = list[FollowedPair]()
    for depth, (nodes, scored) in enumerate(steps):
        if depth == 0:
            ones = torch.ones(len(nodes.y), dtype=torch.float64, device="cpu")
            followed_pairs = [
                FollowedPair(pair, {(): PathTerm(ones, ones)}, [ones]) for pair in pairs
            ]
        shares: dict[tuple[str, int], Tensor] = {}
        for followed_pair in followed_pairs:
            if depth < followed_pair.pair.tree.max_depth:
                followed_pair.follow_level(nodes, greedy, scored, shares)
    return [torch.stack(followed_pair.kept, 1) for followed_pair in followed_pairs]
