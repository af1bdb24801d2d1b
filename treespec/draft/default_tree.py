"""The tree of a verifier without `--tree`, and the verifier that `auto` stands for with one."""

from treespec.draft.calibration import Calibration
from treespec.trees.auto import AutoTree
from treespec.trees.shape import Policy
from treespec.verify.facts import stands_for
from treespec.verify.registry import scheme_by_name
from treespec.verify.scheme import Scheme
from treespec.verify.walk import Verifier, Walk


def default_tree(
    scheme: Scheme,
    deepest: int | None = None,
    calibration: Calibration | None = None,
    several: bool = False,
    paced: bool = False,
) -> Policy:
    """A tree chosen by its cost where acceptance rates are known, else the scheme's own.

    Rates are known for deterministic children. With a head's calibration they are known for draws
    that are accepted in turn.
    deepest: levels that can be drafted; None: any number. several: whether draft models take turns;
    their tree has a fixed shape. paced: whether the verifier takes any tree; then `auto` guesses
    unknown rates and learns them from the text.
    """
    calibrated = calibration is not None and bool(calibration.rates)
    known = scheme.deterministic or (scheme.accepted_in_turn and calibrated)
    if (known or paced) and not several:
        return AutoTree(depth=min(AutoTree.depth, deepest or AutoTree.depth))
    return scheme.default_tree.cut(deepest) if deepest else scheme.default_tree


def verifier_for(verifier: Verifier, several: bool, tree: Policy | None) -> Verifier:
    """The verifier that `auto` stands for. Some trees and several draft models need another one."""
    name = stands_for(verifier, several, tree)
    return Walk(scheme_by_name(name)) if name else verifier
