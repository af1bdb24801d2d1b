"""How each kind of trained head is made, drafts trees, and drafts along a given text.

`treespec.draft.drafters` names these by `family`; a package may bring further ones.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from treespec.draft.drafters import DRAFTERS
from treespec.draft.proposer import Proposer
from treespec.draft.trained import new_heads
from treespec.draft.trained.proposers import (
    BlockProposer,
    EagleProposer,
    HydraProposer,
    MedusaProposer,
)
from treespec.draft.vocabulary import whole
from treespec.heads.block import BlockHead
from treespec.heads.features import FeatureHead
from treespec.heads.head import Head
from treespec.heads.hydra import HydraHead
from treespec.heads.medusa import MedusaHead
from treespec.model.cache import TreeLayer
from treespec.model.target import Target

H = TypeVar("H", bound=Head)


@dataclass(frozen=True)
class Kind(Generic[H]):
    """new: (target, …) -> an untrained head in float32; some kinds take a further option.

    proposer: (head, target) -> the proposer that drafts trees with the head.
    steps: (head, target, tokens [T], features [T, F], steps) -> for draft step 1, 2, … the [R, N]
    draft logits from each of R = T - steps - 1 positions, R > 0.
    """

    new: Callable[..., H]
    proposer: Callable[[H, Target], Proposer]
    steps: Callable[[H, Target, Tensor, Tensor, int], Iterator[Tensor]]

    @torch.no_grad()
    def rollout(
        self, head: H, target: Target, tokens: Tensor, features: Tensor, steps: int
    ) -> Iterator[Tensor]:
        """For draft step 1, 2, … the [R, V] draft logits from each of R = T - steps - 1 positions.

        tokens: [T] int64. features: [T, F] the target's. steps: at most the head's `max_depth`. Row
        t of step d drafts token t + d + 1. Five tokens, two steps:

            token      a    b    c    d    e
            step 1     c    d                  drafted from a and from b, given b and c
            step 2     d    e                  drafted on, given c and d

        A text of fewer than steps + 2 tokens yields nothing.
        """
        if len(tokens) - steps - 1 > 0:
            for logits in self.steps(head, target, tokens, features, steps):
                yield whole(logits, head, target)


def eagle_steps(
    head: FeatureHead, target: Target, tokens: Tensor, features: Tensor, steps: int
) -> Iterator[Tensor]:
    """A rollout from position t uses true pairs up to t, then its own features with the text's tokens.

    Each step appends a stretch to the cache; a row sees only its own entry of it:

        row t sees   | pairs 0 .. t | step 2 of t | step 3 of t | ...
    """
    rollouts = len(tokens) - steps - 1
    caches = [TreeLayer(capacity=rollouts * steps) for _ in head.attentions]
    hidden = head.fuse(features[:rollouts].to(head.dtype))
    seen = torch.ones(rollouts, rollouts, dtype=torch.bool, device=hidden.device).tril()
    own = torch.eye(rollouts, dtype=torch.bool, device=hidden.device)
    for step in range(steps):
        positions = torch.arange(step, step + rollouts, device=hidden.device)
        following = tokens[step + 1 : step + 1 + rollouts]
        hidden = head.step(following[None], hidden[None], positions, seen, caches)[0]
        for cache in caches:
            cache.length += rollouts
        seen = torch.cat([seen, own], dim=1)
        yield head.logits(hidden.to(features.dtype), target)


def medusa_steps(
    head: MedusaHead, target: Target, tokens: Tensor, features: Tensor, steps: int
) -> Iterator[Tensor]:
    """Step d is head d - 1, applied to the same states."""
    states = features[: len(tokens) - steps - 1].to(head.dtype)
    return (head.step(i, states) for i in range(steps))


def hydra_steps(
    head: HydraHead, target: Target, tokens: Tensor, features: Tensor, steps: int
) -> Iterator[Tensor]:
    """Step d is head d - 1, given the text's own tokens."""
    rows = len(tokens) - steps - 1
    positions = torch.arange(rows, device=features.device)
    inputs = head.states(features[None, :rows].to(head.dtype), positions)[0]
    embedded = target.embeddings(tokens).to(head.dtype)
    for i in range(steps):
        inputs = torch.cat([inputs, embedded[i + 1 : i + 1 + rows]], dim=-1)
        yield head.step(i, inputs)


def block_steps(
    head: BlockHead, target: Target, tokens: Tensor, features: Tensor, steps: int
) -> Iterator[Tensor]:
    """Step d is level d of the block below each position in turn."""
    proposer, states = BlockProposer(head, target), []
    for row in range(len(tokens) - steps - 1):
        proposer.observe([features[row : row + 1]], [tokens[row : row + 2]])
        states.append(proposer.drafted(proposer.run(tokens[row + 1 : row + 2]))[0])
    levels = torch.stack(states, dim=1)  # [D, R, H]
    return (head.logits(levels[level], target) for level in range(steps))


EAGLE = Kind(new_heads.new_eagle, EagleProposer, eagle_steps)
EAGLE3 = Kind(new_heads.new_eagle3, EagleProposer, eagle_steps)
MEDUSA = Kind(new_heads.new_medusa, MedusaProposer, medusa_steps)
HYDRA = Kind(new_heads.new_hydra, HydraProposer, hydra_steps)
HYDRA_PLUS = Kind(new_heads.new_hydra_plus, HydraProposer, hydra_steps)
DFLASH = Kind(new_heads.new_dflash, BlockProposer, block_steps)
P_EAGLE = Kind(new_heads.new_p_eagle, BlockProposer, block_steps)

KINDS: dict[str, Kind[Any]] = {  # by the head's own `kind`
    row.name: resolve_name(row.family) for row in DRAFTERS.values() if row.family
}


def draft_steps(head: Head, steps: int) -> int:
    """`steps`, or the head's `max_depth` where that is less."""
    return min(steps, head.max_depth or steps)
