"""Which drafter fits which verifier and tree: the rows of an evaluation."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from treespec.draft.pairing import (
    check_given,
    check_joined,
    check_named,
    check_pair,
    has_given_tokens,
)
from treespec.errors import InputError
from treespec.trees.policy import policy
from treespec.trees.shape import Policy
from treespec.verify.facts import SCHEMES, known_verifier, stands_for

if TYPE_CHECKING:
    from treespec.verify.walk import Verifier


class Pair(NamedTuple):
    """Names as in options. tree: None is the default of the verifier or the drafter."""

    drafter: str
    verifier: str
    tree: str | None


def pairs(
    drafters: Sequence[tuple[str, str | None]],
    verifiers: Sequence[str],
    trees: Sequence[str | None],
    allow_lossy: bool,
) -> tuple[list[Pair], list[str]]:
    """(every drafter with every verifier and tree that it fits, why others were left out).

    drafters: (name, its tree or None). verifiers: names, with a tree of their own as in rrs-wo@2x4.
    A drafter's tree wins over a verifier's, a verifier's over `trees`. Beside other drafters, one
    that hands over given tokens takes no tree, and takes `topk` if it fits no verifier named.
    Raises InputError if a single drafter does not fit all verifiers and trees, or nothing fits.
    """
    fitting: list[Pair] = []
    reasons: list[str] = []
    for drafter, drafters_tree in drafters:
        # 1. The verifiers and trees that this drafter fits.
        check_joined(drafter)
        given = has_given_tokens(drafter) and len(drafters) > 1
        rows: list[Pair] = []
        for verifier, _, verifiers_tree in (name.partition("@") for name in verifiers):
            named = drafters_tree or verifiers_tree
            for tree in [named] if named else trees:
                pair = Pair(drafter, verifier, None if given else tree)
                try:
                    check_paired(verifier, pair.tree, drafter, allow_lossy)
                except InputError as error:
                    if len(drafters) == 1:
                        raise
                    reasons.append(f"{drafter} with {verifier}: {error}")
                else:
                    rows.append(pair)

        # 2. Given tokens have no draft law, which `topk` does without.
        if given and not rows:
            rows.append(Pair(drafter, "topk", None))
        fitting += rows

    # 3. Each pair and reason once.
    if not fitting:
        raise InputError(f"no drafter goes with a verifier and tree: {reasons[0]}")
    return list(dict.fromkeys(fitting)), list(dict.fromkeys(reasons))


def check_paired(
    verifier: str, tree: str | None, drafter: str | None, allow_lossy: bool = False
) -> Policy | None:
    """The tree as an object. tree: None is the default of the verifier or the drafter.

    Raises InputError for unknown names, and if they do not fit each other or the drafter.
    """
    known = known_verifier(verifier, allow_lossy)
    if drafter and has_given_tokens(drafter):
        check_given(drafter.partition(":")[0], known, tree)
    chosen = policy(tree) if tree else None
    if chosen:
        name = stands_for(known, False, chosen)
        check_pair(chosen, SCHEMES[name] if name else known.scheme)
    return chosen


def paired(
    verifier: str, tree: str | None, drafter: str | None, allow_lossy: bool = False
) -> tuple[Policy | None, "Verifier"]:
    """The tree and verifier as objects. Raises InputError as `check_paired`."""
    from treespec.draft.fits import verifier_for  # loads torch
    from treespec.verify.registry import verifier_by_name

    chosen = check_paired(verifier, tree, drafter, allow_lossy)
    return chosen, verifier_for(verifier_by_name(verifier, allow_lossy), False, chosen)


def refuse_unfit(rows: Sequence[Pair], allow_lossy: bool = False) -> None:
    """Raises InputError for a tree that a single drafter cannot draft, as far as its files tell."""
    if len({row.drafter for row in rows}) > 1:  # unfit ones of several are left out later
        return
    for drafter, verifier, tree in rows:
        try:
            check_named(
                drafter, known_verifier(verifier, allow_lossy), policy(tree) if tree else None
            )
        except InputError as error:
            raise InputError(f"{drafter} with {verifier}: {error}") from None
