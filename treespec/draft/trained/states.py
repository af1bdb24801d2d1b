"""Medusa's and Hydra's heads as proposers: they take a hidden state of each sequence's last position.

Medusa's logits of a level are the same at all its nodes; Hydra's depend on the tokens of a path.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from treespec.draft.proposer import Frontier, aligned
from treespec.draft.trained.pairs import PairProposer
from treespec.heads.hydra import HydraHead
from treespec.heads.medusa import MedusaHead
from treespec.model.chunks import Chunk
from treespec.model.masks import rows_of, unpadded
from treespec.model.target import Target


@final
class MedusaProposer(PairProposer):
    """Drafts from the last hidden state of each sequence."""

    head: MedusaHead
    at_once = True

    def __init__(self, head: MedusaHead, target: Target) -> None:
        self.head = head
        self.start(target, None, 0, head.feature_size, head.dtype)
        self.states = torch.empty(0)  # [B, H]
        self.level = 0

    def levels(self, row: int) -> Tensor:
        state = self.states[row]
        return torch.stack([self.head.step(k, state) for k in range(self.head.max_depth)])

    def pairs(
        self, chunk: Chunk, features: Tensor, tokens: Tensor, roots: Tensor | None
    ) -> list[Tensor]:
        return [features]

    def first(self, last: list[Tensor], roots: Tensor) -> Tensor:
        (self.states,), self.level = last, 0
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


@final
class HydraProposer(PairProposer):
    """Drafts with heads and the target's embeddings.

    Hydra++'s prefix layer attends over the hidden states up to a position; its cache is the layer's.
    """

    head: HydraHead

    def __init__(self, head: HydraHead, target: Target, chunk: int | None = None) -> None:
        """chunk: positions per forward of the prefix layer. Default: the target's chunk size."""
        self.head = head
        self.start(target, chunk, int(head.kind == "hydra++"), head.feature_size, head.dtype)
        # [B, F, (level + 2) H] the state, and the embeddings along the path to each frontier node.
        self.inputs = torch.empty(0)
        self.level = 0

    def pairs(
        self, chunk: Chunk, features: Tensor, tokens: Tensor, roots: Tensor | None
    ) -> list[Tensor]:
        for layer in self.cache.tree_layers:
            features = self.head.states(features, chunk.positions, chunk.seen[:, None], layer)
            layer.length += features.shape[1]
        return [features]

    def first(self, last: list[Tensor], roots: Tensor) -> Tensor:
        (states,), self.level = last, 0
        self.inputs = torch.cat([states, self._embedded(roots, states)], dim=-1)[:, None]
        return self.head.step(0, self.inputs)

    @torch.no_grad()
    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        tokens, above, sizes = aligned(frontiers, self.inputs.device)
        if self.vocabulary is not None:
            tokens = self.vocabulary[tokens]
        embedded = self._embedded(tokens, self.inputs)
        self.inputs = torch.cat([rows_of(self.inputs, above), embedded], dim=-1)
        self.level += 1
        logits = self.head.step(self.level, unpadded(self.inputs, sizes))
        return list(logits.split(sizes))

    def new(self) -> "HydraProposer":
        return HydraProposer(self.head, self.target, self.chunk)

    def _embedded(self, tokens: Tensor, like: Tensor) -> Tensor:
        return self.target.embeddings(tokens).to(like.dtype)
