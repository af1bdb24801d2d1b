"""How each kind of trained head is made, drafts trees, and drafts along a given text."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from treespec.draft.proposer import Proposer
from treespec.draft.trained import eagle3
from treespec.draft.trained.block import BlockProposer
from treespec.draft.trained.block_heads import block_rollout, new_dflash, new_p_eagle
from treespec.draft.trained.eagle import EagleProposer, new_head
from treespec.draft.trained.hydra import HydraProposer, hydra_rollout, new_hydra, new_hydra_plus
from treespec.draft.trained.medusa import MedusaProposer, medusa_rollout, new_medusa
from treespec.draft.trained.rollout import rollout
from treespec.heads.head import Head
from treespec.model.target import Target

H = TypeVar("H", bound=Head)


@dataclass(frozen=True)
class Kind(Generic[H]):
    """new: (target, …) -> an untrained head in float32; some kinds take a further option.

    proposer: (head, target) -> the proposer that drafts trees with the head.
    rollout: (head, target, tokens [T], features [T, F], steps) -> for draft step 1, 2, … the [R, V]
    draft logits from each of R = T - steps - 1 positions. Row t of step d is the law of token
    t + d + 1. `steps` is at most the head's `max_depth`. Five tokens, two steps:

        token      a    b    c    d    e
        step 1     c    d                  drafted from a and from b, given b and c
        step 2     d    e                  drafted on, given c and d
    """

    new: Callable[..., H]
    proposer: Callable[[H, Target], Proposer]
    rollout: Callable[[H, Target, Tensor, Tensor, int], Iterator[Tensor]]


KINDS: dict[str, Kind[Any]] = {  # by the head's own `kind`
    "eagle": Kind(new_head, EagleProposer, rollout),
    "eagle3": Kind(eagle3.new_head, EagleProposer, rollout),
    "medusa": Kind(new_medusa, MedusaProposer, medusa_rollout),
    "hydra": Kind(new_hydra, HydraProposer, hydra_rollout),
    "hydra++": Kind(new_hydra_plus, HydraProposer, hydra_rollout),
    "dflash": Kind(new_dflash, BlockProposer, block_rollout),
    "p-eagle": Kind(new_p_eagle, BlockProposer, block_rollout),
}


def draft_steps(head: Head, steps: int) -> int:
    """`steps`, or the head's `max_depth` where that is less."""
    return min(steps, head.max_depth or steps)
