"""The sampled tree, level by level: a node that is less likely to be reached than it costs has no children."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treespec.draft.calibration import Calibration, outline
from treespec.draft.grow.growth import Growth
from treespec.draft.grow.nodes import Nodes
from treespec.draft.grow.static import stack
from treespec.sampling import SamplingParams, probs
from treespec.trees.sampled import allot
from treespec.trees.tree import Drafts
from treespec.verify.optimal import Optimal
from treespec.verify.scheme import Scheme


@dataclass(frozen=True)
class Sampled:
    """What a sampled tree is grown by. price: of a node, in expected tokens."""

    scheme: Scheme
    calibration: Calibration
    depth: int
    price: float


def grow_sampled(
    root: Tensor,
    logits: Tensor,
    by: Sampled,
    params: SamplingParams,
    generator: torch.Generator,
) -> Growth:
    """root: [1] int64. logits: [1, V] draft logits of its children."""
    nodes, laws, draws, inner = Nodes(root), [], [], []
    frontier, reach = np.zeros(1, dtype=np.int64), np.ones(1)  # node numbers, Pr(reached)
    even = isinstance(by.scheme, Optimal) and not by.scheme.first
    for level in range(1, by.depth + 1):
        q = probs(logits, params)
        k, child_reach = allot(reach, *by.calibration.chances(outline(q), level - 1), by.price, even)
        (some,) = np.nonzero(k.any(-1))
        if not len(some):
            break
        if len(some) < len(q):
            q, k, child_reach, frontier = q[some], k[some], child_reach[some], frontier[some]
        drawn = by.scheme.draw(q, torch.from_numpy(k), generator)
        slots = drawn.tokens[:, : child_reach.shape[1]].cpu().numpy()
        row, column = np.nonzero((slots >= 0) & (child_reach[:, : slots.shape[1]] > 0))
        laws.append(q)
        draws.append(drawn)
        inner.append(frontier)
        first = nodes.count
        nodes.add(slots[row, column], frontier[row])
        reach = child_reach[row, column]
        (likely,) = np.nonzero(reach > by.price)
        if level == by.depth or not len(likely):
            break
        frontier, reach = first + likely, reach[likely]
        logits = yield nodes.frontier(likely, some[row[likely]])
    if not inner:
        return nodes.tree()
    numbers = torch.from_numpy(np.concatenate(inner)).to(logits.device)
    return nodes.tree(drafts=Drafts(numbers, torch.cat(laws), stack(draws)))
