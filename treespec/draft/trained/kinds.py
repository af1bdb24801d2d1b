"""The kinds of trained head: how one is made, how it drafts trees, and how it drafts along a given text."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from treespec.draft.proposer import Proposer
from treespec.draft.trained import eagle3
from treespec.draft.trained.eagle import EagleProposer, new_head
from treespec.draft.trained.hydra import HydraProposer, hydra_rollout, new_hydra, new_hydra_plus
from treespec.draft.trained.medusa import MedusaProposer, medusa_rollout, new_medusa
from treespec.draft.trained.rollout import rollout
from treespec.target import Target


@dataclass(frozen=True)
class Kind:
    """new: (target) -> an untrained head in float32. proposer: (head, target) -> what drafts trees with it.

    rollout: (head, target, tokens [T], features [T, F], steps) -> [R, V] draft logits of step 1, 2, … from each of
    R = T - steps - 1 positions: row t of step d is of token t + d + 1. No more steps than the head's `max_depth`.
    own_output: its output rows are among its weights, so that its draft vocabulary is settled before it is trained.
    several: it is a head for each depth, and `new` takes their number too.
    """

    new: Callable[..., Any]
    proposer: Callable[[Any, Target], Proposer]
    rollout: Callable[[Any, Target, Tensor, Tensor, int], Iterator[Tensor]]
    own_output: bool = False
    several: bool = False


KINDS = {  # by the head's own `kind`
    "eagle": Kind(new_head, EagleProposer, rollout),
    "eagle3": Kind(eagle3.new_head, EagleProposer, rollout, own_output=True),
    "medusa": Kind(new_medusa, MedusaProposer, medusa_rollout, several=True),
    "hydra": Kind(new_hydra, HydraProposer, hydra_rollout, several=True),
    "hydra++": Kind(new_hydra_plus, HydraProposer, hydra_rollout, several=True),
}


def draft_steps(head: Any, steps: int) -> int:
    """So many draft steps, or as many as the head has."""
    return min(steps, head.max_depth or steps)
