"""The table of proposers: which one drafts with each kind of head."""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from treespec.draft.heads.base import PairProposer
from treespec.draft.heads.block import BlockProposer, ConditionalProposer
from treespec.draft.heads.eagle import EagleProposer
from treespec.draft.heads.hydra import HydraProposer
from treespec.draft.heads.medusa import MedusaProposer
from treespec.errors import InputError
from treespec.heads.registry import HEAD_KINDS
from treespec.trees.extensions import describe_object, load_installed_rows

ProposerFactory = Callable[[Any, Any], PairProposer]  # (head, target) -> the head's proposer


def read_proposer(name: str, path: str, part: Any) -> ProposerFactory:
    """Check a part of another package. Raises InputError if it cannot be called with a head and a target."""
    if not callable(part):
        raise InputError(
            f"{path} is {describe_object(part)}, must be a Proposer: a class that takes a head and a target"
        )
    factory: ProposerFactory = part
    return factory


PROPOSER_BY_KIND: dict[str, ProposerFactory] = {
    "eagle": EagleProposer,
    "eagle3": EagleProposer,
    "eagle4": EagleProposer,
    "medusa": MedusaProposer,
    "hydra": HydraProposer,
    "hydra++": HydraProposer,
    "dflash": BlockProposer,
    "dspark": ConditionalProposer,
    "dflash2": ConditionalProposer,
    "domino": ConditionalProposer,
    "dspine": ConditionalProposer,
    "p-eagle": BlockProposer,
    **load_installed_rows("proposers", read_proposer),
}


def find_proposer(kind: str) -> ProposerFactory:
    """Returns the proposer of a kind of head: the one that a package's `HeadKind` names, or the table's.

    Raises InputError for a kind without a proposer.
    """
    if HEAD_KINDS[kind].proposer:
        factory: ProposerFactory = resolve_name(HEAD_KINDS[kind].proposer)
        return factory
    if kind in PROPOSER_BY_KIND:
        return PROPOSER_BY_KIND[kind]
    raise InputError(
        f"nothing drafts with heads of kind {kind}: the package that brings them names a proposer as "
        f"an entry point {kind} of treespec.proposers"
    )
