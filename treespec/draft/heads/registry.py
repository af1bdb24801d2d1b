"""The table of what drafts with each kind of head."""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from treespec.draft.heads.base import PairProposer
from treespec.draft.heads.proposers import (
    BlockProposer,
    EagleProposer,
    HydraProposer,
    MedusaProposer,
)
from treespec.errors import InputError
from treespec.heads.registry import HEAD_KINDS
from treespec.options import load_installed_entries

ProposerFactory = Callable[[Any, Any], PairProposer]  # (head, target) -> its proposer

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
    """The proposer of a kind of head: the one that a package's `HeadKind` names, or that of the table.

    Raises InputError for a kind without any.
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
