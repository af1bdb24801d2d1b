"""A tree chosen each cycle by what nodes and levels bring and cost (`treespec.trees.auto`)."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from treespec.draft.calibration import Calibration
from treespec.draft.growth import Growing
from treespec.draft.nodes import Nodes
from treespec.draft.pace import Pace
from treespec.draft.times import Times
from treespec.sampling import SamplingParams, largest, probs
from treespec.trees.auto import AutoTree, best_size
from treespec.trees.sequoia import Best, best_shape, best_trees
from treespec.trees.static import StaticTree
from treespec.trees.tree import TokenTree

GRAINS = 20  # of trust in what is expected


def grow_auto(
    root: Tensor,
    logits: Tensor,
    tree: AutoTree,
    params: SamplingParams,
    pace: Pace,
    calibration: Calibration | None,
) -> Growing[tuple[TokenTree, float, int]]:
    """The likeliest tokens: EAGLE-2's expansion, but a level more only while that is likely to pay, and the best size.

    One more level is expected to bring less than the last by the factor that the last brought less than the one
    before. root: [1] int64. logits: [1, V]. Returns the tree, the accepted nodes it expects, and levels drafted.
    """
    nodes, scores = Nodes(root), []
    frontier, above = np.zeros(1, dtype=np.int64), np.ones(1)  # node numbers, Pr(each is the target's choice)
    forward = pace.forward[: tree.nodes]
    worth, before = 1 - pace.rate * float(forward[0]), 1.0
    for level in range(1, tree.depth + 1):
        children, chance = likely(logits, tree.topk, level - 1, params, calibration)
        first, width = nodes.count, children.shape[1]
        nodes.add(children.ravel(), frontier.repeat(width))
        scores.append((above[:, None] * chance).ravel())
        reach = np.concatenate(scores)
        size, found = best_size(np.sort(reach)[::-1] * pace.trust, forward, pace.rate)
        gain, worth = found - worth, found
        if level == tree.depth or gain * min(gain / before, 1) <= pace.rate * pace.times.step:
            break
        before = max(gain, 1e-9)
        best = best_of(scores[-1], tree.topk)
        frontier, above = first + best, scores[-1][best]
        logits = yield nodes.frontier(best, best // width)
    kept = best_of(reach, size - 1)
    return nodes.tree(np.concatenate([[0], 1 + np.sort(kept)])), float(reach[kept].sum()), level


def best_of(scores: np.ndarray, count: int) -> np.ndarray:
    """`trees.dynamic.best_first` on the host."""
    return np.argsort(-scores, kind="stable")[:count]


def likely(
    logits: Tensor, topk: int, depth: int, params: SamplingParams, calibration: Calibration | None
) -> tuple[np.ndarray, np.ndarray]:
    """[F, K] the likeliest children and Pr(each is the target's choice). logits: [F, V]; depth: of the parents."""
    law = logits.float().softmax(-1) if params.greedy else probs(logits, params)
    found, places = largest(law, min(topk, logits.shape[-1]))
    chance, tokens = found.double().cpu().numpy(), places.cpu().numpy()
    return tokens, calibration.sure(chance, depth) if calibration and params.greedy else chance


def shape_for(pace: Pace, tree: AutoTree, rates: tuple[float, ...]) -> tuple[StaticTree, float]:
    """For sampled children, settled before anything is drafted: the chain or Sequoia's tree with most tokens a second.

    rates: at which the first, second, … child of a node is accepted, and trusted as far as they were right of late.
    Returns the tree and the accepted nodes that it expects.
    """
    return _shape(pace.times, round(pace.trust * GRAINS) / GRAINS, tree, rates)


@lru_cache(1024)
def _shape(times: Times, trust: float, tree: AutoTree, rates: tuple[float, ...]) -> tuple[StaticTree, float]:
    forward, found = torch.from_numpy(times.forward(times.nodes[-1])), []
    for known, cost in ((rates, times.drawn), (rates[:1], times.single)):
        best = _best(known, tree.nodes, tree.depth)
        found.append((best, *best_shape(best, forward, *cost, trust)))
    best, nodes, depth, _ = max(found[-1:] if len(rates) == 1 else found, key=lambda one: one[-1])
    return best.tree(nodes, depth), float(best.tokens[depth, nodes]) - 1


@lru_cache
def _best(rates: tuple[float, ...], nodes: int, depth: int) -> Best:
    return best_trees(torch.tensor(rates), nodes, depth)
