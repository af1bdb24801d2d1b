"""Which verifier, tree and drafter go together. It needs no weights: names and small files tell what it must know."""

import json
from dataclasses import dataclass
from pathlib import Path

from treespec.draft.default_tree import default_tree, verifier_for
from treespec.errors import InputError
from treespec.options import GIVEN, HEADS
from treespec.trees.auto import AutoTree
from treespec.trees.confident import ConfidentChain
from treespec.trees.dynamic import DynamicTree
from treespec.trees.policy import Policy
from treespec.trees.sampled import SampledTree
from treespec.trees.static import StaticTree
from treespec.verify.auto import Auto
from treespec.verify.is_lp import IsLp
from treespec.verify.optimal import Optimal
from treespec.verify.rrs import RRS
from treespec.verify.rrs_wo import RRSWithoutReplacement
from treespec.verify.scheme import Scheme
from treespec.verify.walk import Verifier


@dataclass(frozen=True)
class Draws:
    """What the pairing rules ask of a draft model. several: models that take turns. trained: it is a head.

    deepest: levels that it drafts; None: any number. calibrated: whether a head's calibration.json is there.
    """

    several: bool = False
    trained: bool = False
    deepest: int | None = None
    calibrated: bool = False


def check_named(drafter: str, verifier: Verifier, tree: Policy | None) -> None:
    """Raises InputError for a verifier and tree that do not go with a drafter, `kind:value` as `--drafter` takes it.

    tree: None is the verifier's own. A head that is not on this disk, or is damaged, passes: loading it says so.
    """
    kind, _, value = drafter.partition(":")
    if kind in GIVEN:
        check_given(kind, verifier, tree)
        return
    several = kind == "model" and "+" in value and not Path(value).exists()
    verifier = verifier_for(verifier, several, tree)
    paced = isinstance(verifier, Auto)
    check_pair(tree or default_tree(verifier.scheme, several=several, paced=paced), verifier.scheme, several)
    if tree is not None:  # a default is as deep as the head
        check_fit(tree, verifier.scheme, draws_of(kind, value, several))


def draws_of(kind: str, value: str, several: bool = False) -> Draws:
    """What files and names tell of `--drafter kind:value`."""
    if kind not in HEADS:
        return Draws(several=several)
    folder = Path(value).expanduser()
    if not folder.is_dir():  # a hub id
        return Draws(trained=True, calibrated=True)
    return Draws(trained=True, deepest=levels(folder), calibrated=(folder / "calibration.json").exists())


def levels(folder: Path) -> int | None:
    """How many levels the head in a directory drafts; None: any number, or its files do not tell."""
    from treespec.heads.registry import levels_of  # transformers' configurations come with it

    config, names = written(folder)
    return None if names is None else levels_of(config, names)


def check_kind(kind: str, head: str) -> None:
    """Raises InputError where `--drafter kind:head` names a directory with a head of another kind."""
    actual = None if kind == "head" else kind_in(Path(head).expanduser())
    if actual and actual != kind:
        raise InputError(f"--drafter {kind}:{head} is a head of kind {actual}: write {actual}:{head}")


def kind_in(folder: Path) -> str | None:
    """The kind of the head in a directory; None where its files do not tell."""
    from treespec.heads.registry import kind_of

    config, names = written(folder)
    return None if names is None else kind_of(config, names)


def written(folder: Path) -> tuple[dict[str, object], set[str] | None]:
    """A head's config.json and its tensors' names; ({}, None) where the files do not tell."""
    from treespec.heads.tensors import tensor_names

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}, None
    return (config, tensor_names(folder)) if isinstance(config, dict) else ({}, None)


def check_fit(policy: Policy, scheme: Scheme, model: Draws) -> None:
    """Raises InputError for a policy, scheme and draft model that may not go together."""
    check_pair(policy, scheme, model.several)
    check_depth(policy, model.deepest)
    if isinstance(policy, SampledTree) and not model.calibrated:
        remedy = "make it with treespec calibrate, or take" if model.trained else "without a head take"
        raise InputError(f"the sampled tree needs a head's calibration.json: {remedy} --tree eagle")


def check_pair(policy: Policy, scheme: Scheme, several: bool = False) -> None:
    """The pairing rule: raise InputError for a policy and scheme that may not go together.

    How many draws a node gets must be settled before they are made. Keeping nodes by what was drawn, as the
    dynamic tree does, is harmless only where the children are a function of the text, whose q is one-hot.
    Draws of several draft models, a law each, are for static trees and schemes that take a law a draw.
    """
    if several:
        if not isinstance(policy, StaticTree):
            raise InputError("draft models that take turns need a tree of fixed shape: take --tree eagle or 2x4")
        if not (scheme.deterministic or isinstance(scheme, RRS | IsLp)):
            raise InputError(
                f"verifier {scheme.name} takes one draft law a node, several draft models have one each: "
                "take --verifier rrs, is-lp or topk"
            )
    if isinstance(policy, DynamicTree) and not scheme.deterministic:
        raise InputError(
            f"the dynamic tree cannot go with verifier {scheme.name}: it keeps children by the probability of "
            "what was drawn, which biases sampled draws; take --tree eagle (or another static tree), "
            "or --verifier topk"
        )
    if isinstance(policy, AutoTree):
        return
    if isinstance(policy, SampledTree):
        if not isinstance(scheme, RRSWithoutReplacement | Optimal):
            raise InputError(
                f"the sampled tree cannot go with verifier {scheme.name}: it takes tops and draws from the rest of the "
                "draft law, which rrs-wo, traversal and optimal answer; take one of them, or --tree eagle"
            )
        return
    widest = policy.topk if isinstance(policy, DynamicTree) else policy.max_draws
    if scheme.max_draws and widest > scheme.max_draws:
        raise InputError(
            f"verifier {scheme.name} answers at most {scheme.max_draws} draws a node, this tree makes {widest}; "
            f"take --tree {'chain:5' if scheme.max_draws == 1 else f'balanced:{scheme.max_draws}x3'}"
        )


def check_depth(policy: Policy, deepest: int | None) -> None:
    """Raise InputError for a tree with more levels than can be drafted. deepest: None is any number."""
    if deepest is None or policy.max_depth <= deepest:
        return
    forms: dict[type, str] = {
        DynamicTree: "dynamic:depth=",
        SampledTree: "sampled:depth=",
        AutoTree: "auto:depth=",
        ConfidentChain: "confident:depth=",
    }
    raise InputError(
        f"the tree is {policy.max_depth} deep, the head drafts {deepest} tokens: "
        f"take --tree {forms.get(type(policy), 'chain:')}{deepest}"
    )


def check_given(name: str, verifier: Verifier, tree: object) -> None:
    """The pairing rule of trees of given tokens. Raises InputError for a scheme that needs draft laws, and for a tree.

    At temperature 0 all schemes agree; which one is refused does not hang on it.
    """
    if not verifier.scheme.deterministic and not isinstance(verifier, Auto):
        raise InputError(
            f"{name} hands over given tokens, which have no draft law for verifier {verifier.name}: "
            "take --verifier topk, or auto"
        )
    if tree is not None:
        raise InputError(f"{name} makes its own tree: leave out --tree, and see --drafter {name}:… for its options")
