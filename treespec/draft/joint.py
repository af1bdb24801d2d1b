"""A memory and what drafts beside it, as they are loaded."""

from dataclasses import dataclass
from typing import final

from treespec.draft.model_free.suffix import Suffix
from treespec.draft.proposer import Proposer
from treespec.heads.head import Head


@final
@dataclass(frozen=True)
class Joint:
    """drafting: a trained head, or a proposer."""

    memory: Suffix
    drafting: Head | Proposer
