"""List the pairs of a verifier and a tree whose τ is measured, and explain why others are left out."""

from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

from treespec.draft.auto.cost import CycleCost
from treespec.draft.pairing import check_named
from treespec.draft.spec import DrafterSpec
from treespec.errors import InputError
from treespec.eval.acceptance.config import TauConfig
from treespec.eval.acceptance.decoded import Decoded, Simulated
from treespec.eval.acceptance.path_probability import (
    LEAF_FIRST_VERIFIERS,
    Pair,
    build_pair,
    find_inner_nodes,
)
from treespec.eval.acceptance.planned import Planned
from treespec.trees.policy import parse_policy
from treespec.trees.shape import Policy
from treespec.trees.static import StaticTree
from treespec.verify.registry import load_verifier
from treespec.verify.walk import Verifier, is_walk, is_walk_of_most_likely

Measured: TypeAlias = Pair | Planned | Decoded | Simulated
Costs: TypeAlias = dict[int, CycleCost]  # batch size -> cost model
TREE_VERIFIERS = LEAF_FIRST_VERIFIERS | {
    "gumbel",
    "auto",
}  # treespec's, besides walks over a scheme
NO_DISTRIBUTION = (
    "it has no draft distribution along a text: take another tree, such as dynamic or auto"
)
OWN_TREE_LABEL = "its own"  # names the tree of a drafter without draft distributions


@dataclass(frozen=True)
class MeasuredPair:
    """A verifier on a tree, with the name of its drafter and the costs of that drafter's cycles by batch size."""

    drafter: str
    pair: Measured
    costs: Costs


def list_pairs(config: TauConfig) -> tuple[list[list[Measured]], dict[str, str]]:
    """List the pairs to compare.

    Returns:
        The pairs of each drafter, and the reason for each pair that is left out.

    Raises:
        InputError: all pairs are left out.
    """
    pairs_by_drafter = list[list[Measured]]()
    left_out = dict[str, str]()
    for drafter in config.drafters:
        pairs = list[Measured]()
        for shape in list_shapes(drafter, config):
            for verifier in config.verifiers:
                tree = parse_shape(shape)
                reason = explain_misfit(verifier, tree, drafter, bool(config.text))
                if reason:
                    left_out[f"{drafter.short} {verifier}@{shape}"] = reason
                else:
                    pairs.append(make_pair(verifier, shape, tree, config.samples))
        pairs_by_drafter.append(pairs)
    if not any(pairs_by_drafter):
        raise InputError("; ".join(left_out.values()))
    return pairs_by_drafter, left_out


def list_shapes(drafter: DrafterSpec, config: TauConfig) -> list[str]:
    """List the trees of a drafter as `--tree` names them; a drafter with its own tree has only that."""
    if drafter.tree:
        return [drafter.tree]
    if drafter.kind.one_hot:
        return [OWN_TREE_LABEL]
    return config.trees


def parse_shape(shape: str) -> Policy | None:
    """Parse the policy that `shape` names; None stands for the drafter's own tree."""
    if shape == OWN_TREE_LABEL:
        return None
    return parse_policy(shape)


def has_fixed_shape(tree: Policy | None) -> TypeGuard[StaticTree]:
    """Whether a tree has the same shape in every cycle."""
    return hasattr(tree, "paths")


def has_planned_shape(tree: Policy | None) -> TypeGuard[Policy]:
    """Whether the draft's levels fix a tree's shape in every cycle, before anything is drawn."""
    return tree is not None and tree.at_once and tree.may_draw


def make_pair(verifier: str, shape: str, tree: Policy | None, samples: int) -> Measured:
    """Make a pair of a verifier and a tree that `explain_misfit` allows. samples: answers of a simulated one."""
    loaded = load_verifier(verifier)
    if has_planned_shape(tree) and not loaded.scheme.deterministic:
        return Planned(verifier, shape, loaded.scheme, tree)
    if not has_fixed_shape(tree):
        return Decoded(verifier, shape, tree)
    pair = build_pair(verifier, shape, loaded.scheme, tree)
    if is_simulated(verifier, loaded):
        return Simulated(pair, samples)
    return pair


def is_simulated(name: str, verifier: Verifier) -> bool:
    """Whether a verifier of another package judges whole trees, so that nobody knows what it keeps of a text."""
    if name.partition(":")[0] in TREE_VERIFIERS:
        return False
    return verifier.coupled or not is_walk(verifier)


def explain_misfit(
    verifier: str, tree: Policy | None, drafter: DrafterSpec, are_texts_given: bool
) -> str:
    """Explain why a verifier is not measured on a drafter's tree; "" if it is.

    Args:
        verifier: as `--verifier` names it.
        tree: the tree policy; None: the drafter's own tree.
        drafter: drafts the tree.
        are_texts_given: whether the texts come from `--text`; otherwise they are the target's answers.
    """
    loaded = load_verifier(verifier)
    max_draws = loaded.scheme.max_draws
    if has_planned_shape(tree) and not loaded.scheme.deterministic:
        return explain_planned_misfit(verifier, loaded, tree, drafter)
    if not has_fixed_shape(tree):
        return explain_redrafted_misfit(verifier, are_texts_given)
    if is_simulated(verifier, loaded):
        return explain_simulated_misfit(verifier, loaded, tree, drafter, are_texts_given)
    if drafter.cache or not drafter.kind.is_head:
        return NO_DISTRIBUTION
    if len(tree.paths) - 1 < sum(map(tree.count_draws, find_inner_nodes(tree))):
        return "a draw has no node: treespec eval measures it"
    if verifier == "auto":
        return "auto chooses its trees: take --tree auto"
    if max_draws and tree.max_draws > max_draws:
        return f"{verifier} makes {max_draws} draws at most"
    return ""


def explain_simulated_misfit(
    name: str, verifier: Verifier, tree: Policy, drafter: DrafterSpec, are_texts_given: bool
) -> str:
    """Explain why a verifier does not write answers by a drafter's tree; "" if it does."""
    if are_texts_given:
        return f"{name} writes texts of its own: leave out --text"
    try:
        check_named(drafter, verifier, tree)
    except InputError as error:
        return str(error)
    return ""


def explain_planned_misfit(
    name: str, verifier: Verifier, tree: Policy, drafter: DrafterSpec
) -> str:
    """Explain why a verifier of draws is not measured on a tree that is shaped before they are drawn; "" if it is."""
    if is_simulated(name, verifier):
        return "it judges whole trees of a fixed shape here: take another tree, such as 2x4"
    if drafter.cache or not drafter.kind.is_head:
        return NO_DISTRIBUTION
    try:
        check_named(drafter, verifier, tree)
    except InputError as error:
        return str(error)
    return ""


def explain_redrafted_misfit(verifier: str, are_texts_given: bool) -> str:
    """Explain why a verifier is not measured on a tree whose shape changes each cycle; "" if it is."""
    if are_texts_given and verifier in ("gumbel", "auto"):
        return f"{verifier} writes texts of its own on such trees: leave out --text"
    if verifier not in ("gumbel", "auto") and not is_walk_of_most_likely(load_verifier(verifier)):
        return "topk, gumbel and auto are measured here, the others by treespec eval"
    return ""
