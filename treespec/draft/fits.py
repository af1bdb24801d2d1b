"""Which policy goes with which scheme and draft model. It loads no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treespec.errors import InputError
from treespec.trees.auto import AutoTree
from treespec.trees.confident import ConfidentChain
from treespec.trees.ddtree import DDTree
from treespec.trees.dynamic import DynamicTree
from treespec.trees.sampled import SampledTree
from treespec.trees.shape import Policy
from treespec.trees.static import StaticTree
from treespec.verify.facts import Facts

if TYPE_CHECKING:
    from treespec.verify.scheme import Scheme


@dataclass(frozen=True)
class DraftModel:
    """What the pairing rules ask about a draft model, known before its weights are read.

    several: whether these are several models that take turns.
    trained: whether it is a trained head.
    deepest: the largest number of levels that it drafts; None: any number.
    calibrated: whether the head's directory has a calibration.json.
    at_once: whether the law of a level depends on the text alone, so that all are known at first.
    """

    several: bool = False
    trained: bool = False
    deepest: int | None = None
    calibrated: bool = False
    at_once: bool = False


def fits_auto(policy: AutoTree, scheme: "Facts | Scheme", model: DraftModel) -> None:
    check_one_law(model)
    check_depth(policy.max_depth, model, "auto:depth=")


def fits_confident(policy: ConfidentChain, scheme: "Facts | Scheme", model: DraftModel) -> None:
    check_one_law(model)
    check_depth(policy.max_depth, model, "confident:depth=")


def fits_ddtree(policy: DDTree, scheme: "Facts | Scheme", model: DraftModel) -> None:
    """Raises InputError also for a draft model whose laws depend on what it drafted before."""
    check_one_law(model)
    if not model.at_once:
        raise InputError(
            "the tree ddtree needs a head that drafts all levels at once (medusa, dflash, "
            "p-eagle): take --tree dynamic with --verifier topk, or --tree eagle"
        )


def fits_dynamic(policy: DynamicTree, scheme: "Facts | Scheme", model: DraftModel) -> None:
    """Raises InputError also for sampled draws: a choice by drafted tokens biases them."""
    check_one_law(model)
    if not scheme.deterministic:
        raise InputError(
            f"the dynamic tree cannot go with verifier {scheme.name}: it keeps children by the "
            "probability of what was drawn, which biases sampled draws; take --tree eagle (or "
            "another static tree), or --verifier topk"
        )
    check_width(policy.topk, scheme)
    check_depth(policy.max_depth, model, "dynamic:depth=")


def fits_sampled(policy: SampledTree, scheme: "Facts | Scheme", model: DraftModel) -> None:
    """Raises InputError also for a scheme without sure tokens and a model not calibrated."""
    check_one_law(model)
    if not scheme.sure_tokens:
        raise InputError(
            f"the sampled tree cannot go with verifier {scheme.name}: it takes tops and draws "
            "from the rest of the draft law, which rrs-wo, traversal and optimal answer; take "
            "one of them, or --tree eagle"
        )
    check_depth(policy.max_depth, model, "sampled:depth=")
    if not model.calibrated:
        make_it = "make it with treespec calibrate, or take"
        remedy = make_it if model.trained else "without a head take"
        raise InputError(f"the sampled tree needs a head's calibration.json: {remedy} --tree eagle")


def fits_static(policy: StaticTree, scheme: "Facts | Scheme", model: DraftModel) -> None:
    """Raises InputError also for models that take turns if the scheme needs one law a node."""
    if model.several and not (scheme.deterministic or scheme.law_per_draw):
        raise InputError(
            f"verifier {scheme.name} takes one draft law a node, several draft models have one "
            "each: take --verifier rrs, is-lp or topk"
        )
    check_width(policy.max_draws, scheme)
    check_depth(policy.max_depth, model, "chain:")


def check_one_law(model: DraftModel) -> None:
    """Raises InputError for draft models that take turns: the policy needs one law a node."""
    if model.several:
        raise InputError(
            "draft models that take turns need a tree of fixed shape: take --tree eagle or 2x4"
        )


def check_depth(levels: int, model: DraftModel, form: str) -> None:
    """Raises InputError for a tree of more levels than the model drafts.

    form: the start of the `--tree` value that the error offers, such as `chain:`.
    """
    if model.deepest is not None and levels > model.deepest:
        raise InputError(
            f"the tree is {levels} deep, the head drafts {model.deepest} tokens: take --tree "
            f"{form}{model.deepest}"
        )


def check_width(draws: int, scheme: "Facts | Scheme") -> None:
    """Raises InputError for a tree with more draws a node than the scheme answers."""
    most = scheme.max_draws
    if most and draws > most:
        remedy = "chain:5" if most == 1 else f"balanced:{most}x3"
        raise InputError(
            f"verifier {scheme.name} answers at most {most} draws a node, this tree makes {draws}; "
            f"take --tree {remedy}"
        )


FITS: dict[type, Callable[[Any, "Facts | Scheme", DraftModel], None]] = {
    StaticTree: fits_static,
    DynamicTree: fits_dynamic,
    SampledTree: fits_sampled,
    AutoTree: fits_auto,
    ConfidentChain: fits_confident,
    DDTree: fits_ddtree,
}


def check_fit(policy: Policy, scheme: "Facts | Scheme", model: DraftModel) -> None:
    """Raises InputError where policy, scheme and draft model cannot be paired."""
    FITS[type(policy)](policy, scheme, model)
