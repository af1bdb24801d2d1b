"""Growing the tree of a head that drafts all levels at once (`treespec.trees.ddtree`)."""

from typing import final

import torch
from torch import Tensor

from treespec.draft.grow.dynamic import grow_dynamic
from treespec.draft.grow.grower import Grower
from treespec.draft.grow.growth import Growth
from treespec.draft.grow.static import grow_static
from treespec.shaping.sampling import SamplingParams, largest, probs
from treespec.trees.ddtree import DDTree, likeliest_shape
from treespec.trees.dynamic import DynamicTree


@final
class DDTreeGrower(Grower[DDTree]):
    """Grows the likeliest paths, or a tree of draws of the same shape."""

    def grow(
        self, root: Tensor, logits: Tensor, params: SamplingParams, generator: torch.Generator
    ) -> Growth:
        # 1. The laws of all levels.
        assert self.ahead
        levels, scheme = self.ahead()[: self.policy.depth], self.means.scheme_at(params)
        nodes = self.policy.nodes

        # 2. The likeliest tokens: a dynamic tree that expands as many nodes a level as it keeps.
        #    No path below any other node of a level is among the likeliest of all.
        if scheme.deterministic:
            return grow_dynamic(root, logits, DynamicTree(len(levels), nodes - 1, nodes))

        # 3. Draws: the shape is settled by the laws, before any draw.
        most = min(nodes - 1, scheme.max_draws or nodes, levels.shape[1])
        chances, _ = largest(probs(levels, params), most)
        shape = likeliest_shape(chances.double().cpu().numpy(), nodes)
        return grow_static(root, logits, shape, scheme, params, generator)
