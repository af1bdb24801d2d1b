"""A tree chosen each cycle by what nodes and levels bring and cost (`treespec.trees.auto`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np
import torch
from torch import Tensor

from treespec.draft.calibration import Calibration, nearest
from treespec.draft.grow.grower import DraftModel, Grower, Means, check_depth, check_one_law
from treespec.draft.grow.growth import Growth
from treespec.draft.grow.nodes import Nodes
from treespec.draft.grow.static import grow_static
from treespec.draft.pace.pace import CERTAIN, Pace, Promise, bounded
from treespec.draft.pace.times import Times
from treespec.sampling import SamplingParams, largest, probs
from treespec.trees.auto import AutoTree, best_size
from treespec.trees.sequoia import best_trees
from treespec.trees.static import StaticTree
from treespec.verify.scheme import Scheme
from treespec.verify.topk import TopK

SLOPE = 4  # nodes over which the price of one more is averaged: measured times have steps
GRAIN = 0.1  # in the logarithm of trust
COLDEST = 0.01  # the temperature whose rates are those of temperature 0


def grow_auto(
    root: Tensor,
    logits: Tensor,
    tree: AutoTree,
    params: SamplingParams,
    pace: Pace,
    calibration: Calibration | None,
) -> Growth:
    """The likeliest tokens: a level more, of the nodes that pay, while that is likely to pay; then
    the best size.

    root: [1] int64. logits: [1, V] draft logits of its children. Tells the pace what the tree
    promises.
    """
    nodes, promises, scores = Nodes(root), [], []
    frontier, above = (
        np.zeros(1, dtype=np.int64),
        np.ones(1),
    )  # node numbers, Pr(each is the target's choice)
    forward, inner, tops = pace.forward[: tree.nodes], 0, pace.rates[0]
    for level in range(1, tree.depth + 1):
        # 1. Candidates below the frontier, by how often such promises were kept.
        children, chance = likely(logits, tree.topk, level - 1, params, calibration)
        first, width = nodes.count, children.shape[1]
        nodes.add(children.ravel(), frontier.repeat(width))
        promises.append(chance.ravel())
        scores.append((above[:, None] * pace.by_law.believed(chance)).ravel())
        inner += len(frontier)

        # 2. The best size of all candidates so far, and what one more node costs there.
        reach = np.concatenate(scores)
        size, _ = best_size(np.sort(reach)[::-1], forward, pace.rate)
        end = min(size + SLOPE, len(forward))
        price = pace.rate * float(forward[end - 1] - forward[size - 1]) / max(end - size, 1)

        # 3. Nodes of the last level whose children are likely to pay.
        best = best_of(scores[-1], tree.topk)
        step, row = pace.rate * pace.times.step, pace.rate * pace.times.row
        tops += float(chance[0, 0])
        next_chance = min(tops / (level + 1) * float(pace.by_law.factors[0]), CERTAIN)
        ahead = tree.depth - level
        expanded = expansion(scores[-1][best], next_chance, price, step, row, ahead) if ahead else 0
        if not expanded:
            break
        best = best[:expanded]
        frontier, above = first + best, scores[-1][best]
        logits = yield nodes.frontier(best, best // width)

    # 4. The best candidates, and what they promise.
    size = max(size, 2) if pace.trying else size
    kept = np.concatenate(
        [[0], 1 + best_of(reach, size - 1)]
    )  # best first: the likely path is not moved in caches
    grown = nodes.tree(kept)
    parents = grown.parents.cpu().numpy()
    chances = np.concatenate([[1.0], *promises])[kept]
    pace.promise = Promise(pace.by_law, pace.cost(len(kept), level, None, inner), parents, chances)
    return grown


def expansion(
    reach: np.ndarray, chance: float, price: float, step: float, row: float, levels: int
) -> int:
    """How many of the best nodes of a level to expand; 0 ends the tree.

    Below a node of reach r a chain is expected, of reach r·chance, r·chance², …; each of its nodes
    costs `price`. A level costs `step`, and `row` for each node but one. The number of nodes and
    levels that brings most decides. All in tokens. reach: [M] descending.

        reach .8 .2   chance .7   price .1   step .2    one level of the first node    .56 - .1 - .2         = .26
                                                        two levels of it              .26 + .39 - .1 - .2   = .35
                                                        two levels, the second too    .35 + .14 - .1        = .39
    """
    depth = np.arange(1, levels + 1)
    gain = (reach[:, None] * chance**depth - price).clip(min=0) - row  # [M, L]
    gain[0] += row - step
    worth = gain.cumsum(1).cumsum(0)
    nodes, _ = np.unravel_index(int(worth.argmax()), worth.shape)
    return int(nodes) + 1 if worth.max() > 0 else 0


def best_of(scores: np.ndarray, count: int) -> np.ndarray:
    """`trees.dynamic.best_first` on the host."""
    return np.argsort(-scores, kind="stable")[:count]


def likely(
    logits: Tensor, topk: int, depth: int, params: SamplingParams, calibration: Calibration | None
) -> tuple[np.ndarray, np.ndarray]:
    """[F, K] the likeliest children and Pr(each is the target's choice).

    logits: [F, V]; depth: of the parents.
    """
    law = logits.float().softmax(-1) if params.greedy else probs(logits, params)
    found, places = largest(law, min(topk, logits.shape[-1]))
    chance, tokens = found.double().cpu().numpy(), places.cpu().numpy()
    return tokens, calibration.sure(chance, depth) if calibration and params.greedy else chance


@dataclass(frozen=True)
class Shape:
    """A tree settled before anything is drafted. likeliest: of the likeliest tokens, not of draws.

    inner: its nodes that have children. speed: tokens a second, as far as rates are trusted.
    parents: [N]. chances: [N] Pr(a node is accepted | its parent is), as promised.
    """

    tree: StaticTree
    likeliest: bool
    inner: int
    speed: float
    parents: np.ndarray
    chances: np.ndarray

    def promise(self, pace: Pace) -> Promise:
        draws = 0 if self.likeliest else self.tree.max_draws
        cost = pace.cost(self.tree.size, self.tree.max_depth, draws, self.inner)
        return Promise(pace.by_rates, cost, self.parents, self.chances)


def shape_for(pace: Pace, tree: AutoTree, draws: int | None) -> Shape:
    """The chain or Sequoia's tree with most tokens a second, by the rates as far as they can be
    trusted.

    draws: at a node, at most; None: any number; 0: the likeliest tokens are taken.
    """
    first, others = (round(math.log(trust) / GRAIN) for trust in pace.by_rates.factors.tolist())
    rates = pace.rates[: draws or None]
    return _shape(pace.times, rates, draws == 0, (first, others if len(rates) > 1 else 0), tree)


@lru_cache(4096)
def _shape(
    times: Times, rates: tuple[float, ...], likeliest: bool, grains: tuple[int, int], tree: AutoTree
) -> Shape:
    """grains: of trust, on a grid that is fine enough."""
    first, others = (math.exp(grain * GRAIN) for grain in grains)
    trusted = np.array([[rates[0] * first, *(rate * others for rate in rates[1:])]])
    known = tuple(bounded(trusted)[0].tolist())
    forward = times.forward(min(times.nodes[-1], tree.nodes))
    shapes = [_fastest(known[0], (), forward, times, 0 if likeliest else 1, tree.depth)]
    if len(rates) > 1:
        shapes.append(
            _fastest(known[0], known[1:], forward, times, 0 if likeliest else 2, tree.depth)
        )
    found, speed = max(shapes, key=lambda one: one[1])
    number = {path: node for node, path in enumerate(found.paths)}
    parents = np.array([-1, *(number[path[:-1]] for path in found.paths[1:])])
    chances = np.array([1.0, *(rates[path[-1]] for path in found.paths[1:])])
    return Shape(found, likeliest, len(set(parents[1:].tolist())), speed, parents, chances)


def _fastest(
    first: float,
    others: tuple[float, ...],
    forward: np.ndarray,
    times: Times,
    draws: int,
    depth: int,
) -> tuple[StaticTree, float]:
    """Of all sizes and depths the tree with most tokens a second (`trees.sequoia`), and how many."""
    best = best_trees(torch.tensor([first, *others]), len(forward), depth)
    levels, nodes = np.arange(1, depth + 1)[:, None], np.arange(2, len(forward) + 1)
    inner = np.maximum(nodes / 2, levels) if others else levels
    begin, step = times.levels(draws)
    seconds = (
        forward[1:]
        + begin
        + step * (levels - 1)
        + times.row * (inner - levels)
        + times.resting(draws)
    )
    speed = best.tokens[1:, 2:].numpy() / seconds
    place = np.unravel_index(int(speed.argmax()), speed.shape)
    return best.tree(int(place[1]) + 2, int(place[0]) + 1), float(speed[place])


@final
class AutoGrower(Grower[AutoTree]):
    """pace: what drafting brought to this text and costs; None before the first cycle."""

    def __init__(self, policy: AutoTree, means: Means) -> None:
        super().__init__(policy, means)
        self.pace: Pace | None = None

    @staticmethod
    def fits(policy: AutoTree, scheme: Scheme, model: DraftModel) -> None:
        check_one_law(model)
        check_depth(policy.max_depth, model, "auto:depth=")

    def rests(self, params: SamplingParams) -> bool:
        """Where no tree is expected to be faster than one token at a time."""
        pace = self.pace = self.pace or self._new_pace(params.temperature)
        if pace.idle:  # nothing was learned since it was last asked
            return pace.rests(pace.hope)
        shape = self._shape(pace, params)
        if not shape.likeliest:
            return pace.rests(shape.speed)
        pace.start(shape.speed)
        return pace.rests(max(shape.speed, pace.speed))

    def grow(
        self, root: Tensor, logits: Tensor, params: SamplingParams, generator: torch.Generator
    ) -> Growth:
        """The likeliest tokens level by level where that is faster, else a tree settled before
        anything is drafted.
        """
        pace = self.pace
        assert pace
        shape = self._shape(pace, params)
        if shape.likeliest and pace.speed > shape.speed:
            return grow_auto(root, logits, self.policy, params, pace, self.means.calibration)
        pace.promise = shape.promise(pace)
        scheme = TopK() if shape.likeliest else self.means.scheme
        return grow_static(root, logits, shape.tree, scheme, params, generator)

    def feedback(self, path: Sequence[int]) -> None:
        if self.pace:
            self.pace.settle(path)

    def _new_pace(self, temperature: float) -> Pace:
        assert self.means.times
        known = self.means.calibration.rates if self.means.calibration else {}
        rates = nearest(known, max(temperature, COLDEST)) if known else None
        return Pace(self.means.times(), rates)

    def _shape(self, pace: Pace, params: SamplingParams) -> Shape:
        """The best of the trees whose shape is settled before anything is drafted."""
        scheme = self.means.scheme
        likeliest = params.greedy or scheme.deterministic
        return shape_for(pace, self.policy, 0 if likeliest else scheme.max_draws)
