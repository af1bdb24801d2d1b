"""A tree chosen each cycle by what nodes and levels bring and cost (`treespec.trees.auto`)."""

import math

import torch
from torch import Tensor

from treespec.draft.calibration import Calibration
from treespec.draft.growth import Frontier, Growing
from treespec.draft.pace import Pace
from treespec.sampling import SamplingParams, largest, probs
from treespec.trees.auto import AutoTree, best_size
from treespec.trees.dynamic import best_first, connect
from treespec.trees.mask import ancestor_mask
from treespec.trees.tree import TokenTree

CHILDREN = 3  # nodes that a level of a sampled tree has, about


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
    device = logits.device
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    tokens, parents, depths, scores = [root], [zero], [zero], []
    frontier, above, count = zero, torch.ones(1, device=device), 1
    forward = pace.forward[: tree.nodes].to(device)
    worth, before = 1 - pace.rate * float(forward[0]), 1.0
    for level in range(1, tree.depth + 1):
        children, chance = likely(logits, tree.topk, level - 1, params, calibration)
        tokens.append(children.flatten())
        parents.append(frontier.repeat_interleave(children.shape[1]))
        depths.append(torch.full((children.numel(),), level, device=device))
        scores.append((above[:, None] * chance).flatten())
        reach = torch.cat(scores)
        size, found = best_size(reach.sort(descending=True).values * pace.trust, forward, pace.rate)
        gain, worth = found - worth, found
        if level == tree.depth or gain * min(gain / before, 1) <= pace.rate * pace.times.step:
            break
        before = max(gain, 1e-9)
        best = best_first(scores[-1], tree.topk)
        frontier, above = count + best, scores[-1][best]
        count += children.numel()
        logits = yield Frontier(tokens[-1][best], best // children.shape[1])
    kept = best_first(reach, size - 1)
    expected = float(reach[kept].sum())
    kept = torch.cat([zero, 1 + kept.sort().values])
    links = connect(kept, torch.cat(parents))
    grown = TokenTree(torch.cat(tokens)[kept], links, torch.cat(depths)[kept], ancestor_mask(links, level))
    return grown, expected, level


def likely(
    logits: Tensor, topk: int, depth: int, params: SamplingParams, calibration: Calibration | None
) -> tuple[Tensor, Tensor]:
    """[F, K] the likeliest children and Pr(each is the target's choice). logits: [F, V]; depth: of the parents."""
    law = logits.float().softmax(-1) if params.greedy else probs(logits, params)
    chance, tokens = largest(law, min(topk, logits.shape[-1]))
    return tokens, calibration.sure(chance, depth) if calibration and params.greedy else chance


def sampled_by(pace: Pace, tree: AutoTree, calibration: Calibration, temperature: float) -> tuple[int, float]:
    """Depth and price of a node for a sampled tree, settled before anything is drafted.

    A tree of n nodes loses its price with its last one, so that what n nodes bring is the sum of the prices.
    """
    least = pace.rate * (pace.times.drawn[1] + CHILDREN * float(pace.forward[-1] - pace.forward[0]) / len(pace.forward))
    depth = math.floor(math.log(min(least, 1)) / math.log(pace.persistence)) if least < 1 else 1
    prices = calibration.prices(tree.nodes, temperature)
    nodes, _ = best_size(prices.cummin(0).values, pace.forward[: tree.nodes], pace.rate)
    return min(max(depth, 1), tree.depth), float(prices[max(nodes - 2, 0)])
