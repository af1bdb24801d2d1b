"""The table of proposers: which one drafts with each kind of head."""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from treespec.draft.heads.base import PairProposer
from treespec.draft.heads.block import BlockProposer
from treespec.draft.heads.eagle import EagleProposer
from treespec.draft.heads.hydra import HydraProposer
from treespec.draft.heads.medusa import MedusaProposer
from treespec.errors import InputError
from treespec.heads.registry import HEAD_KINDS
from treespec.options import load_installed_entries

ProposerFactory = Callable[[Any, Any], PairProposer]  # (head, target) -> the head's proposer

PROPOSER_BY_KIND: dict[str, ProposerFactory] = {
    "eagle": EagleProposer,
    "eagle3": EagleProposer,
    "medusa": MedusaProposer,
    "hydra": HydraProposer,
    "hydra++": HydraProposer,
    "dflash": BlockProposer,
    "p-eagle": BlockProposer,
    **load_installed_entries("proposers"),
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
