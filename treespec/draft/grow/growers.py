"""The table of growers: policy -> grower."""

from typing import Any

from treespec.draft.grow.auto import AutoGrower
from treespec.draft.grow.confident import ConfidentGrower
from treespec.draft.grow.ddtree import DDTreeGrower
from treespec.draft.grow.dynamic import DynamicGrower
from treespec.draft.grow.grower import Grower, Means
from treespec.draft.grow.sampled import SampledGrower
from treespec.draft.grow.static import StaticGrower
from treespec.trees.auto import AutoTree
from treespec.trees.confident import ConfidentChain
from treespec.trees.ddtree import DDTree
from treespec.trees.dynamic import DynamicTree
from treespec.trees.sampled import SampledTree
from treespec.trees.shape import Policy
from treespec.trees.static import StaticTree

GROWERS: dict[type, type[Grower[Any]]] = {
    StaticTree: StaticGrower,
    DynamicTree: DynamicGrower,
    SampledTree: SampledGrower,
    AutoTree: AutoGrower,
    ConfidentChain: ConfidentGrower,
    DDTree: DDTreeGrower,
}


def new_grower(policy: Policy, means: Means) -> Grower[Any]:
    """A grower for one text."""
    return GROWERS[type(policy)](policy, means)
