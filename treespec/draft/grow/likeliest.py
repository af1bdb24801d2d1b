"""A tree of the likeliest tokens, shaped level by level by what nodes bring and cost (`treespec.trees.auto`)."""

import numpy as np
from torch import Tensor

from treespec.draft.calibration import Calibration
from treespec.draft.grow.growth import Growth
from treespec.draft.grow.nodes import Nodes
from treespec.draft.pace.pace import CERTAIN, Pace, Promise
from treespec.shaping.sampling import SamplingParams, largest, probs
from treespec.trees.auto import AutoTree, best_size

SLOPE = 4  # nodes over which the price of one more is averaged: measured times have steps


def grow_likeliest(
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
    # numbers of nodes, and Pr(each is the target's choice)
    frontier, above = np.zeros(1, dtype=np.int64), np.ones(1)
    forward, inner, tops = pace.forward[: tree.nodes], 0, pace.rates[0]
    for level in range(1, tree.depth + 1):
        # 1. Candidates below the frontier, by how often such promises were kept.
        children, chance = likely(logits, tree.topk, level - 1, params, calibration)
        first, width = nodes.count, children.shape[1]
        nodes.add(children.ravel(), frontier.repeat(width))
        promises.append(chance.ravel())
        scores.append((above[:, None] * pace.by_law.believed(chance, level - 1)).ravel())
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
        next_chance = min(tops / (level + 1) * float(pace.by_law.factors[1, 0]), CERTAIN)
        ahead = tree.depth - level
        expanded = expansion(scores[-1][best], next_chance, price, step, row, ahead) if ahead else 0
        if not expanded:
            break
        best = best[:expanded]
        frontier, above = first + best, scores[-1][best]
        logits = yield nodes.frontier(best, best // width)

    # 4. The best candidates, and what they promise.
    size = max(size, 2) if pace.trying else size
    kept = np.concatenate([[0], 1 + best_of(reach, size - 1)])  # a likely path stays in its place
    grown = nodes.tree(kept)
    parents = grown.parents.cpu().numpy()
    chances = np.concatenate([[1.0], *promises])[kept]
    cost = pace.cost(len(kept), level, None, inner)
    pace.promise = Promise(pace.by_law, cost, parents, chances)
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
