"""Trees of drawn tokens, and of the likeliest, whose shape is settled before anything is drafted."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from treespec.draft.pace.pace import Pace, Promise, bounded
from treespec.draft.pace.times import SMALL, Times
from treespec.trees.auto import AutoTree
from treespec.trees.sequoia import Best, best_trees, with_root
from treespec.trees.static import StaticTree

# Grid of the logarithm of trust, in first children and in others. A shape holds until trust has moved
# by more than this from the place that the shape was made for.
GRAINS = np.array([0.1, 0.3])


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
    rates = pace.rates[: draws or None]
    trust = np.log(pace.by_rates.factors) / GRAINS
    if pace.grains is None or np.abs(trust - pace.grains).max() > 1:
        pace.grains = np.rint(trust)
    grains = pace.grains * [1, len(rates) > 1]
    return _shape(pace.times, rates, draws == 0, tuple(grains.ravel().tolist()), tree)


@lru_cache(4096)
def _shape(
    times: Times,
    rates: tuple[float, ...],
    likeliest: bool,
    grains: tuple[float, ...],
    tree: AutoTree,
) -> Shape:
    """`shape_for` at a place of the grid of trust. grains: four, as `Trust.factors` has them."""
    # 1. The rates as far as they are trusted: [2, K] of the root's children, and of deeper ones.
    trust = np.exp(GRAINS * np.array(grains).reshape(2, 2))
    others = len(rates) - 1
    trusted = bounded(np.array(rates) * trust[:, [0, *[1] * others]])

    # 2. The fastest chain, or the fastest tree if that is faster.
    forward = times.forward(min(times.nodes[-1], tree.nodes))
    shapes = [_fastest(trusted[:, :1], forward, times, 0 if likeliest else 1, tree.depth)]
    if others:
        shapes.append(_fastest(trusted, forward, times, 0 if likeliest else 2, tree.depth))
    fastest, speed = max(shapes, key=lambda shape: shape[1])

    # 3. What it promises, before any correction.
    number = {path: node for node, path in enumerate(fastest.paths)}
    parents = np.array([-1, *(number[path[:-1]] for path in fastest.paths[1:])])
    chances = np.array([1.0, *(rates[path[-1]] for path in fastest.paths[1:])])
    return Shape(fastest, likeliest, len(set(parents[1:].tolist())), speed, parents, chances)


@lru_cache(1024)
def _deeper(rates: tuple[float, ...], nodes: int, depth: int) -> Best:
    """`best_trees` of the rates below the root, which many trees share."""
    return best_trees(torch.tensor(rates), nodes, depth)


def _fastest(
    rates: np.ndarray, forward: np.ndarray, times: Times, draws: int, depth: int
) -> tuple[StaticTree, float]:
    """Of all sizes and depths the tree with most tokens a second (`trees.sequoia`), and how many.

    rates: [2, K] of the root's children, and of deeper ones.
    """
    at_root, deeper = rates.tolist()
    best = with_root(_deeper(tuple(deeper), len(forward), depth), torch.tensor(at_root))
    levels, nodes = np.arange(1, depth + 1)[:, None], np.arange(2, len(forward) + 1)
    inner = np.maximum(nodes / 2, levels) if rates.shape[1] > 1 else levels
    begin, step = times.levels(draws)
    seconds = (
        forward[1:]
        + begin
        + step * (levels - 1)
        + times.inner(draws) * (inner - levels)
        + times.resting(draws)
        + times.further(draws) * (nodes - SMALL)
    )
    speed = best.tokens[1:, 2:].numpy() / seconds
    place = np.unravel_index(int(speed.argmax()), speed.shape)
    return best.tree(int(place[1]) + 2, int(place[0]) + 1), float(speed[place])
