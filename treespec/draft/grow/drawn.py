"""Growing trees whose shape follows from the draft distributions, a level at a time."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treespec.draft.calibration import Calibration
from treespec.draft.drafter import Frontier
from treespec.draft.grow.fixed import Drawn, draft_laws, drafts_of
from treespec.draft.grow.growth import Growth, Nodes
from treespec.draft.outlines import outline
from treespec.shaping.sampling import SamplingParams, probs
from treespec.trees.sampled import allot
from treespec.verify.distributions import SureScheme
from treespec.verify.scheme import Scheme


@dataclass(frozen=True)
class Sampled:
    """What a sampled tree grows by (`treespec.trees.sampled`).

    depth: the largest number of levels. price: of a node, in expected tokens.
    """

    scheme: SureScheme
    calibration: Calibration
    depth: int
    price: float


def grow_sampled(
    root: Tensor, logits: Tensor, by: Sampled, params: SamplingParams, generator: torch.Generator
) -> Growth:
    """The growth of a sampled tree. A node that is reached less often than its price is a leaf.

    root: [1] int64. logits: [1, V] draft logits of its children.
    """
    nodes, levels = Nodes(root), list[Drawn]()
    frontier, reach = np.zeros(1, dtype=np.int64), np.ones(1)  # node numbers, Pr(reached)
    for level in range(1, by.depth + 1):
        # 1. The numbers of draws and sure tokens, fixed before drawing.
        q = probs(logits, params)
        tops, accepted = by.calibration.chances(outline(q), level - 1)
        k, child_reach = allot(reach, tops, accepted, by.price, by.scheme.equal_draws)

        # 2. The nodes that have any.
        (some,) = np.nonzero(k.any(-1))
        if not len(some):
            break
        if len(some) < len(q):
            q, k, child_reach, frontier = q[some], k[some], child_reach[some], frontier[some]

        # 3. Their draws; of repeats and further draws none has a node.
        number, sure = torch.from_numpy(k).unbind(-1)
        drawn = by.scheme.draw_with_sure(q, number, sure, generator)
        slots = drawn.tokens[:, : child_reach.shape[1]].cpu().numpy()
        row, column = np.nonzero((slots >= 0) & (child_reach[:, : slots.shape[1]] > 0))
        levels.append((torch.from_numpy(frontier).to(q.device), q, drawn))

        # 4. The next frontier: the children that are likely enough.
        first = nodes.count
        nodes.add(*map(torch.from_numpy, (slots[row, column], frontier[row])))
        reach = child_reach[row, column]
        (likely,) = np.nonzero(reach > by.price)
        if level == by.depth or not len(likely):
            break
        frontier, reach = first + likely, reach[likely]
        logits = yield nodes.frontier(*map(torch.from_numpy, (likely, some[row[likely]])))
    return nodes.tree(drafts=drafts_of(levels))


@dataclass(frozen=True)
class Confident:
    """What a confident chain grows by (`treespec.trees.confident`).

    threshold: γ. A token's confidence is its probability at temperature 1, as in the paper.
    """

    scheme: Scheme
    depth: int
    threshold: float


def grow_confident(
    root: Tensor, logits: Tensor, by: Confident, params: SamplingParams, generator: torch.Generator
) -> Growth:
    """The growth of a confident chain. The host waits once a level.

    root: [1] int64. logits: [1, V] draft logits of its child.
    """
    nodes, levels, scheme = Nodes(root), list[Drawn](), by.scheme
    for level in range(1, by.depth + 1):
        # 1. Draw the next token.
        q = logits if scheme.deterministic else draft_laws(logits, scheme, params, 1)
        drawn, parent = scheme.draw(q, 1, generator), root.new_tensor([level - 1])
        nodes.add(drawn.tokens[:, 0], parent)
        levels.append((parent, q, drawn))

        # 2. Stop below an unsure token, which stays in the chain.
        last = drawn.tokens[:, 0].clamp_min(0)
        if level == by.depth or not float(logits.float().softmax(-1)[0, last]) >= by.threshold:
            break
        logits = yield Frontier(last, torch.zeros_like(last))
    return nodes.tree(drafts=None if scheme.deterministic else drafts_of(levels))
