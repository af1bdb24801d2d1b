"""What is drafted where no tree is named."""

from dataclasses import replace

from treespec.trees.dynamic import DynamicTree
from treespec.trees.policy import Policy
from treespec.trees.static import balanced, chain, eagle
from treespec.verify.is_lp import IsLp
from treespec.verify.scheme import Scheme


def default_tree(scheme: Scheme, deepest: int | None = None) -> Policy:
    """EAGLE-2's dynamic tree where the children are deterministic, else as much of EAGLE-1's as the scheme takes.

    `is-lp` accepts either of two draws as readily, so that both have to go deep. deepest: levels that can be drafted,
    None is any number.
    """
    if scheme.deterministic:
        tree = DynamicTree()
        return replace(tree, depth=min(tree.depth, deepest or tree.depth))
    if isinstance(scheme, IsLp):
        fixed = balanced(2, 3)
    elif scheme.max_draws == 1:
        fixed = chain(5)
    else:
        fixed = eagle().narrowed(scheme.max_draws) if scheme.max_draws else eagle()
    return fixed.cut(deepest) if deepest else fixed
