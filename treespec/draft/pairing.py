"""Checks which verifier, tree and drafter go together, by names and small files, not by weights.

This module must not load torch before it needs a scheme's code.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from treespec.draft.registry import DRAFTERS
from treespec.draft.spec import DrafterSpec
from treespec.errors import InputError
from treespec.heads.registry import HEAD_KINDS, count_folder_levels, detect_folder_kind
from treespec.trees.dynamic import AutoTree
from treespec.trees.shape import Policy
from treespec.trees.static import build_chain
from treespec.verify.facts import SchemeInfo, VerifierInfo

if TYPE_CHECKING:
    from treespec.verify.scheme import Scheme
    from treespec.verify.walk import Verifier

ALL_LEVEL_DRAFTERS = ", ".join(row.name for row in DRAFTERS.values() if row.at_once)


@dataclass(frozen=True)
class ProposerInfo:
    """The facts of a draft model that the pairing rules need, known before its weights are read.

    Attributes:
        trained: whether it is a trained head.
        deepest: the largest number of levels that it drafts; None: any number.
        at_once: whether all levels are known, or predicted, before the first token is drafted.
    """

    trained: bool = False
    deepest: int | None = None
    at_once: bool = False


ANY_DRAFT_MODEL = ProposerInfo(at_once=True)  # a draft model that goes with every tree


def check_fit(
    policy: Policy, scheme: "SchemeInfo | Scheme", model: ProposerInfo = ANY_DRAFT_MODEL
) -> None:
    """Raises InputError if policy, scheme and draft model cannot be paired."""
    # 1. The policy needs all levels at once, and the draft model drafts one at a time.
    if policy.at_once and not model.at_once:
        raise InputError(
            f"the tree {policy.name} needs a head that drafts all levels at once ({ALL_LEVEL_DRAFTERS}): take "
            "--tree dynamic with --verifier topk, or --tree eagle"
        )

    # 2. The scheme draws children, and the policy would keep only some of them.
    if not policy.may_draw and not scheme.deterministic:
        raise InputError(
            f"the {policy.name} tree cannot go with verifier {scheme.name}: it keeps children by the "
            "probability of what was drawn, which biases sampled draws; take --tree eagle (or another "
            "static tree), or --verifier topk"
        )

    # 3. More draws at a node than the scheme verifies.
    draws = policy.max_draws
    if draws and scheme.max_draws and draws > scheme.max_draws:
        narrower = f"balanced:{scheme.max_draws}x3"
        if scheme.max_draws == 1:
            narrower = "chain:5"
        raise InputError(
            f"verifier {scheme.name} answers at most {scheme.max_draws} draws a node, this tree makes "
            f"{draws}; take --tree {narrower}"
        )

    # 4. More levels than the head has.
    if not policy.at_once:
        check_depth(policy, model)


def check_depth(policy: Policy, model: ProposerInfo) -> None:
    """Raises InputError for a tree that is deeper than the draft model drafts."""
    if model.deepest and policy.max_depth > model.deepest:
        shallower = f"{policy.name}:depth={model.deepest}"
        if policy.name == "static":
            shallower = f"chain:{model.deepest}"
        raise InputError(
            f"the tree is {policy.max_depth} deep, the head drafts {model.deepest} tokens: take --tree "
            f"{shallower}"
        )


def check_several_models(policy: Policy, scheme: "SchemeInfo | Scheme") -> None:
    """Raises InputError for a tree and scheme that do not go with trees of several draft models."""
    if policy.timed:
        raise InputError(
            f"the {policy.name} tree is chosen by the cost of one draft model: with several take --tree chain:4 or "
            "another one"
        )
    if not scheme.deterministic and not scheme.takes_several_models:
        raise InputError(
            f"verifier {scheme.name} takes the draws of one draft model: with several take --verifier rrs, auto or topk"
        )


def refuse_suffix_beside_several(spec: DrafterSpec) -> None:
    """Raises InputError for a suffix cache beside several draft models."""
    if spec.cache:
        raise InputError(
            f"--drafter {spec.written}: suffix drafts beside one model: take suffix+model:{spec.places[0]}, "
            f"or {spec.own} alone"
        )


def choose_default_tree(scheme: "Scheme", deepest: int | None) -> Policy:
    """Returns the tree without `--tree`: `auto` for a deterministic scheme, else the scheme's default.

    The default has no more draws at a node than the scheme verifies.

    deepest: the number of levels that can be drafted; None: any number.
    """
    if scheme.deterministic:
        if deepest:
            return AutoTree(depth=min(AutoTree.depth, deepest))
        return AutoTree()
    tree = scheme.default_tree
    if scheme.max_draws:
        tree = tree.limit_draws(scheme.max_draws)
    if deepest:
        tree = tree.cut(deepest)
    return tree


def check_named(
    spec: DrafterSpec, verifier: "VerifierInfo | Verifier", tree: Policy | None
) -> None:
    """Raises InputError for a verifier and tree that do not go with a drafter.

    A missing or damaged head passes: loading it raises the error. tree: None: the verifier's default.
    """
    if spec.kind.one_hot:
        check_one_hot(spec.kind.name, verifier, tree)
        return
    if tree is None:
        tree = build_chain(1)  # a default tree fits its verifier and head
    check_fit(tree, verifier.scheme, describe_draft_model(spec))
    if len(spec.places) > 1:
        refuse_suffix_beside_several(spec)
        check_several_models(tree, verifier.scheme)


def describe_draft_model(spec: DrafterSpec) -> ProposerInfo:
    """Describes the draft model that a drafter names, as far as names and small files tell."""
    if not spec.kind.is_head:
        return ProposerInfo(at_once=spec.kind.at_once)
    folder = Path(spec.place).expanduser()
    kind: str | None = spec.kind.name
    if kind == "head":
        kind = detect_folder_kind(folder)
    deepest = None
    if folder.is_dir():  # else a hub id, which may hold anything
        deepest = count_folder_levels(folder)
    at_once = kind is None or HEAD_KINDS[kind].foresees
    return ProposerInfo(True, deepest, at_once)


def check_one_hot(name: str, verifier: "VerifierInfo | Verifier", tree: object) -> None:
    """Raises InputError for a scheme or tree that a drafter without draft distributions cannot go with.

    It takes no tree, and no scheme that needs a distribution, also not at temperature 0, where all schemes agree.
    """
    if not verifier.scheme.deterministic:
        raise InputError(
            f"{name} hands over given tokens, which have no draft distribution for verifier "
            f"{verifier.name}: take --verifier topk or auto, or give --head or another --drafter"
        )
    if tree is not None:
        raise InputError(
            f"{name} makes its own tree: leave out --tree, or give --head or another --drafter"
        )
