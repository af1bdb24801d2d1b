"""Medusa's heads as a proposer: the logits of a level are the same at all its nodes."""

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from treespec.draft.proposer import Frontier
from treespec.draft.trained.states import LastStates, StateProposer
from treespec.draft.vocabulary import whole
from treespec.errors import InputError
from treespec.heads.medusa import MedusaHead
from treespec.model.target import Target


def new_medusa(target: Target, heads: int = 5) -> MedusaHead:
    """Untrained heads for a target, in float32; they start with a copy of its output embedding."""
    sizes = {"hidden_size": target.feature_width, "vocab_size": target.vocab_size}
    head = MedusaHead(
        {"model_type": "medusa", "medusa_num_heads": heads, "medusa_num_layers": 1} | sizes
    )
    for layer in head.output_layers:
        layer.weight = torch.nn.Parameter(output_weight(target))
    return head


def output_weight(target: Target) -> Tensor:
    """[V, H] a copy of the target's output embedding, in float32.

    Raises InputError if it is offloaded.
    """
    if target.model.get_output_embeddings().weight.is_meta:
        raise InputError(
            "the target's output embedding is offloaded; give it room on a device to train heads"
        )
    return target.output_rows(torch.arange(target.vocab_size)).weight.float().clone()


@final
class MedusaProposer(StateProposer):
    """Drafts from the last hidden state of each text; one text at first."""

    head: MedusaHead
    at_once = True

    def __init__(self, head: MedusaHead, target: Target) -> None:
        self.head, self.target, self.vocab_size = head, target, target.vocab_size
        self.observed = LastStates()
        self.states = torch.empty(0)  # [B, H]
        self.level = 0

    def levels(self, row: int) -> Tensor:
        state = self.states[row]
        return torch.stack([self.head.step(k, state) for k in range(self.head.max_depth)])

    def start(self, states: Tensor, roots: Tensor) -> Tensor:
        self.states, self.level = states, 0
        return self._logits()

    @torch.no_grad()
    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        self.level += 1
        sizes = [len(frontier.tokens) if frontier else 0 for frontier in frontiers]
        return [row.expand(size, -1) for row, size in zip(self._logits(), sizes, strict=True)]

    def new(self) -> "MedusaProposer":
        return MedusaProposer(self.head, self.target)

    def _logits(self) -> Tensor:
        """[B, 1, N] logits, by the head of this level."""
        return self.head.step(self.level, self.states)[:, None]


@torch.no_grad()
def medusa_rollout(
    head: MedusaHead, target: Target, tokens: Tensor, features: Tensor, steps: int
) -> Iterator[Tensor]:
    """`Kind.rollout`: step d is head d - 1, applied to the same states."""
    states = features[: max(0, len(tokens) - steps - 1)].to(head.dtype)
    for i in range(steps if len(states) else 0):
        logits = head.step(i, states)
        yield whole(logits, head, target)
