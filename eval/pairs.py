"""Which drafter goes with which verifier and tree: the rows of an evaluation."""

from collections.abc import Sequence
from typing import NamedTuple

from treespec.draft.default_tree import verifier_for
from treespec.draft.pairing import check_given, check_named, check_pair
from treespec.errors import InputError
from treespec.options import GIVEN
from treespec.trees.policy import policy
from treespec.trees.shape import Policy
from treespec.verify.registry import verifier_by_name
from treespec.verify.walk import Verifier


class Pair(NamedTuple):
    """Names as in options. tree: None is the default for the verifier or drafter."""

    drafter: str
    verifier: str
    tree: str | None


def pairs(
    drafters: Sequence[tuple[str, str | None]],
    verifiers: Sequence[str],
    trees: Sequence[str | None],
    allow_lossy: bool,
) -> tuple[list[Pair], list[str]]:
    """Every drafter with every verifier and tree that it goes with, and why others were left out.

    drafters: (name, its own tree or None). A verifier may name its tree too, rrs-wo@2x4; the
    drafter's wins. A drafter that hands over given tokens takes no tree, and `topk` where no other
    verifier fits. A single drafter must fit all verifiers and trees: else InputError.
    """
    found: list[Pair] = []
    reasons: list[str] = []
    for drafter, its_own in drafters:
        given = drafter.partition(":")[0] in GIVEN and len(drafters) > 1
        rows: list[Pair] = []
        for verifier, _, own in (name.partition("@") for name in verifiers):
            for tree in [its_own or own] if its_own or own else trees:
                pair = Pair(drafter, verifier, None if given else tree)
                try:
                    paired(verifier_by_name(verifier, allow_lossy), pair.tree, drafter)
                except InputError as error:
                    if len(drafters) == 1:
                        raise
                    reasons.append(f"{drafter} with {verifier}: {error}")
                else:
                    rows.append(pair)
        found += rows or ([Pair(drafter, "topk", None)] if given else [])
    if not found:
        raise InputError(f"no drafter goes with a verifier and tree: {reasons[0]}")
    return list(dict.fromkeys(found)), list(dict.fromkeys(reasons))


def paired(
    verifier: Verifier, tree: str | None, drafter: str | None
) -> tuple[Policy | None, Verifier]:
    """The tree and verifier as objects. Raises InputError where they do not fit.

    tree: None is the default for the verifier or drafter.
    """
    kind = (drafter or "").partition(":")[0]
    if kind in GIVEN:
        check_given(kind, verifier, tree)
    chosen = policy(tree) if tree else None
    verifier = verifier_for(verifier, False, chosen)
    if chosen:
        check_pair(chosen, verifier.scheme)
    return chosen, verifier


def refuse_unfit(drafts: Sequence[tuple[str, Policy | None, Verifier]]) -> None:
    """Raises InputError for trees that a single drafter cannot draft, as far as its files tell."""
    if len({drafter for drafter, _, _ in drafts}) > 1:  # then those that do not fit are left out
        return
    for drafter, tree, verifier in drafts:
        try:
            check_named(drafter, verifier, tree)
        except InputError as error:
            raise InputError(f"{drafter} with {verifier.name}: {error}") from None
