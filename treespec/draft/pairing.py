"""Which verifier, tree and drafter go together. It checks names and small files, not weights.

This module must not load torch before it needs a scheme's code.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from treespec.draft.registry import DRAFTERS
from treespec.draft.spec import DrafterSpec
from treespec.heads.registry import kind_in, levels_in
from treespec.options import MANY, refuse
from treespec.trees.dynamic import AutoTree
from treespec.trees.shape import Policy
from treespec.trees.static import chain
from treespec.verify.facts import Facts, Known

if TYPE_CHECKING:
    from treespec.verify.scheme import Scheme
    from treespec.verify.walk import Verifier

AT_ONCE = ", ".join(row.name for row in DRAFTERS.values() if row.at_once)


@dataclass(frozen=True)
class DraftModel:
    """What the pairing rules ask about a draft model, known before its weights are read.

    trained: whether it is a trained head.
    deepest: the largest number of levels that it drafts; None: any number.
    at_once: whether the distribution of a level depends on the text alone, so that all are known at first.
    """

    trained: bool = False
    deepest: int | None = None
    at_once: bool = False


ANY = DraftModel(at_once=True)  # a draft model that goes with every tree


def check_fit(policy: Policy, scheme: "Facts | Scheme", model: DraftModel = ANY) -> None:
    """Raises InputError where policy, scheme and draft model cannot be paired."""
    # 1. What does not fit.
    draws = policy.max_draws or 0
    most = scheme.max_draws or MANY
    deepest = model.deepest or MANY
    by_level = policy.at_once and not model.at_once
    biased = not (policy.may_draw or scheme.deterministic)
    too_deep = policy.max_depth > deepest and not policy.at_once

    # 2. What to do.
    pair = f"the {policy.name} tree cannot go with verifier {scheme.name}"
    narrower = "chain:5" if most == 1 else f"balanced:{most}x3"
    form = "chain:" if policy.name == "static" else f"{policy.name}:depth="
    refuse(
        {
            f"the tree {policy.name} needs a head that drafts all levels at once ({AT_ONCE}): take "
            "--tree dynamic with --verifier topk, or --tree eagle": by_level,
            f"{pair}: it keeps children by the probability of what was drawn, which biases sampled "
            "draws; take --tree eagle (or another static tree), or --verifier topk": biased,
            f"verifier {scheme.name} answers at most {most} draws a node, this tree makes {draws}; "
            f"take --tree {narrower}": draws > most,
            f"the tree is {policy.max_depth} deep, the head drafts {deepest} tokens: take --tree "
            f"{form}{deepest}": too_deep,
        }
    )


def default_tree(scheme: "Scheme", deepest: int | None) -> Policy:
    """The tree without `--tree`: one chosen by its cost for children that are not drawn, else the scheme's.

    deepest: levels that can be drafted; None: any number.
    """
    if scheme.deterministic:
        return AutoTree(depth=min(AutoTree.depth, deepest or AutoTree.depth))
    return scheme.default_tree.cut(deepest) if deepest else scheme.default_tree


def check_named(spec: DrafterSpec, verifier: "Known | Verifier", tree: Policy | None) -> None:
    """Raises InputError for a verifier and tree that do not go with a drafter.

    tree: None is the verifier's own. A head that is missing or damaged passes: loading it raises
    the error.
    """
    if spec.kind.one_hot:
        check_one_hot(spec.kind.name, verifier, tree)
        return
    # a default tree fits its verifier and head
    check_fit(tree or chain(1), verifier.scheme, model_of(spec))


def model_of(spec: DrafterSpec) -> DraftModel:
    """The draft model that a drafter names, as far as its files and names tell."""
    if not spec.kind.is_head:
        return DraftModel()
    folder = Path(spec.place).expanduser()
    kind = kind_in(folder) if spec.kind.name == "head" else spec.kind.name
    here = folder.is_dir()  # else a hub id, which may hold anything
    at_once = kind is None or DRAFTERS[kind].at_once
    return DraftModel(True, levels_in(folder) if here else None, at_once)


def check_one_hot(name: str, verifier: "Known | Verifier", tree: object) -> None:
    """The pairing rule of drafters whose tokens have no draft distribution.

    Raises InputError for a scheme that needs one, and for a tree. It does so at temperature 0 too,
    where all schemes agree.
    """
    takes = verifier.scheme.deterministic
    refuse(
        {
            f"{name} hands over given tokens, which have no draft distribution for verifier "
            f"{verifier.name}: take --verifier topk, or auto": not takes,
            f"{name} makes its own tree: leave out --tree, and see --drafter {name}:… for its "
            "options": tree is not None,
        }
    )
