"""Growing the sampled tree (`treespec.trees.sampled`), a level at a time."""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from treespec.draft.calibration import Calibration
from treespec.draft.grow.dynamic import grow_dynamic
from treespec.draft.grow.grower import Grower
from treespec.draft.grow.growth import Growth
from treespec.draft.grow.nodes import Nodes
from treespec.draft.grow.static import stack
from treespec.draft.outlines import outline
from treespec.shaping.sampling import SamplingParams, probs
from treespec.trees.dynamic import DynamicTree
from treespec.trees.sampled import SampledTree, allot
from treespec.trees.tree import Drafts
from treespec.verify.scheme import SureScheme, takes_sure_tokens


@final
class SampledGrower(Grower[SampledTree]):
    """Grows sampled trees; at temperature 0, dynamic trees of the same nodes and depth."""

    def grow(
        self, root: Tensor, logits: Tensor, params: SamplingParams, generator: torch.Generator
    ) -> Growth:
        tree, scheme, calibration = self.policy, self.means.scheme, self.means.calibration
        if params.greedy:
            return grow_dynamic(root, logits, DynamicTree(tree.depth, nodes=tree.nodes))
        assert calibration
        assert takes_sure_tokens(scheme)
        price = tree.price or calibration.price(tree.nodes, params.temperature)
        by = Sampled(scheme, calibration, tree.depth, price)
        return grow_sampled(root, logits, by, params, generator)


@dataclass(frozen=True)
class Sampled:
    """What a sampled tree grows by.

    depth: the largest number of levels. price: of a node, in expected tokens.
    """

    scheme: SureScheme
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
    """The growth of a sampled tree. A node that is reached less often than its price is a leaf.

    root: [1] int64. logits: [1, V] draft logits of its children.
    """
    nodes, laws, draws, inner = Nodes(root), [], [], []
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
        laws.append(q)
        draws.append(drawn)
        inner.append(frontier)

        # 4. The next frontier: the children that are likely enough.
        first = nodes.count
        nodes.add(slots[row, column], frontier[row])
        reach = child_reach[row, column]
        (likely,) = np.nonzero(reach > by.price)
        if level == by.depth or not len(likely):
            break
        frontier, reach = first + likely, reach[likely]
        logits = yield nodes.frontier(likely, some[row[likely]])

    # 5. The tree, with the laws and draws of all levels.
    if not inner:
        return nodes.tree()
    numbers = torch.from_numpy(np.concatenate(inner)).to(logits.device)
    return nodes.tree(drafts=Drafts(numbers, torch.cat(laws), stack(draws)))
