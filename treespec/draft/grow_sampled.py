"""The sampled tree, level by level: a node that is less likely to be reached than it costs has no children."""

from dataclasses import dataclass

import torch
from torch import Tensor

from treespec.draft.calibration import Calibration
from treespec.draft.grow_static import stack
from treespec.draft.growth import Frontier, Growth
from treespec.sampling import SamplingParams, probs
from treespec.trees.mask import ancestor_mask
from treespec.trees.sampled import allot
from treespec.trees.tree import Drafts, TokenTree
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
    device = logits.device
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    tokens, parents, depths = [root], [zero - 1], [zero]
    laws, draws, inner = [], [], []
    frontier, reach, count = zero, torch.ones(1, device=device), 1  # node numbers, Pr(reached), nodes so far
    even = isinstance(by.scheme, Optimal) and not by.scheme.first
    for level in range(1, by.depth + 1):
        q = probs(logits, params)
        k, child_reach = allot(reach, *by.calibration.chances(q, level - 1), by.price, even)
        some = k.any(-1).nonzero().squeeze(1)
        if not len(some):
            break
        if len(some) < len(q):
            q, k, child_reach, frontier = q[some], k[some], child_reach[some], frontier[some]
        drawn = by.scheme.draw(q, k, generator)
        slots = drawn.tokens[:, : child_reach.shape[1]]
        row, column = ((slots >= 0) & (child_reach[:, : slots.shape[1]] > 0)).nonzero(as_tuple=True)
        laws.append(q)
        draws.append(drawn)
        inner.append(frontier)
        tokens.append(slots[row, column])
        parents.append(frontier[row])
        depths.append(torch.full_like(row, level))
        reach = child_reach[row, column]
        likely = (reach > by.price).nonzero().squeeze(1)
        if level == by.depth or not len(likely):
            break
        frontier, reach = count + likely, reach[likely]
        count += len(row)
        logits = yield Frontier(tokens[-1][likely], some[row[likely]])
    links = torch.cat(parents)
    drafts = Drafts(torch.cat(inner), torch.cat(laws), stack(draws)) if inner else None
    return TokenTree(torch.cat(tokens), links, torch.cat(depths), ancestor_mask(links, by.depth), drafts)
