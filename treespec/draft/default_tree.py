"""What is drafted where no tree is named, and which verifier `auto` is for a tree that is."""

from typing import TYPE_CHECKING

from treespec.trees.auto import AutoTree
from treespec.trees.dynamic import DynamicTree
from treespec.trees.policy import Policy
from treespec.trees.static import StaticTree, balanced, chain, eagle
from treespec.verify.auto import Auto
from treespec.verify.is_lp import IsLp
from treespec.verify.optimal import Optimal
from treespec.verify.rrs import RRS
from treespec.verify.rrs_wo import RRSWithoutReplacement
from treespec.verify.scheme import Scheme
from treespec.verify.topk import TopK
from treespec.verify.walk import Verifier, Walk

if TYPE_CHECKING:
    from treespec.draft.calibration import Calibration


def default_tree(
    scheme: Scheme,
    deepest: int | None = None,
    calibration: "Calibration | None" = None,
    several: bool = False,
    paced: bool = False,
) -> Policy:
    """A tree chosen by its cost where what its nodes bring is known, else as much of EAGLE-1's as the scheme takes.

    That is known of children that are deterministic, and with a head's rates of draws that are accepted one after
    another. `is-lp` accepts either of two draws as readily, so that both have to go deep. deepest: levels that can be
    drafted; None: any number. several: draft models that take turns, whose tree is of fixed shape. paced: what is not
    known is guessed, and learned from the text.
    """
    in_turn = isinstance(scheme, RRSWithoutReplacement | Optimal) or scheme.max_draws == 1
    known = calibration is not None and bool(calibration.rates)
    if (scheme.deterministic or paced or (in_turn and known)) and not several:
        return AutoTree(depth=min(AutoTree.depth, deepest or AutoTree.depth))
    fixed = fixed_tree(scheme)
    return fixed.cut(deepest) if deepest else fixed


def fixed_tree(scheme: Scheme) -> StaticTree:
    if isinstance(scheme, IsLp):
        return balanced(2, 3)
    if scheme.max_draws == 1:
        return chain(5)
    return eagle().narrowed(scheme.max_draws) if scheme.max_draws else eagle()


def verifier_for(verifier: Verifier, several: bool, tree: Policy | None) -> Verifier:
    """The verifier that `auto` stands for: itself, but where a tree or several draft models go with others alone."""
    if not isinstance(verifier, Auto):
        return verifier
    if several:
        return Walk(RRS())
    return Walk(TopK()) if isinstance(tree, DynamicTree) else verifier
