"""The EAGLE heads as a proposer. The cache keeps the target's features of accepted tokens, and
forgets those that the head drafted.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from treespec.draft.models.branch import Levels
from treespec.draft.proposer import Frontier
from treespec.draft.trained.pairs import PairProposer
from treespec.heads.features import FeatureHead
from treespec.model.chunks import Chunk
from treespec.model.masks import rows_of, unpadded
from treespec.model.target import Target
from treespec.trees.mask import committed


@final
class EagleProposer(PairProposer):
    """Drafts with a head and the target's output path; one text at first.

    Levels of the trees are written behind the pairs in the head's own cache, one row a text, and
    forgotten by the next `begin`:

        | observed pairs | level 1 | level 2 | ...

    Texts with fewer pairs or frontier nodes are padded with ones that no node sees.
    """

    head: FeatureHead

    def __init__(self, head: FeatureHead, target: Target, chunk: int | None = None) -> None:
        """chunk: pairs per forward of the head. Default: the target's chunk size."""
        self.head = head
        self.start(target, chunk, len(head.attentions), head.feature_size, head.dtype)
        self.positions = torch.empty(0)  # [B, 1] positions of the last level's features
        self.frontier = torch.empty(0)  # [B, F, H] features extrapolated at the frontiers
        self.drafted = Levels(torch.empty(0))

    def new(self) -> "EagleProposer":
        return EagleProposer(self.head, self.target, self.chunk)

    def first(self, last: list[Tensor], roots: Tensor) -> Tensor:
        self.frontier = last[0][:, None]
        device = self.frontier.device
        self.drafted = Levels(committed(self.cache.lengths, device))
        self.positions = torch.tensor(self.cache.lengths, device=device)[:, None] - 1
        return self.head.logits(self.frontier, self.target)

    def pairs(
        self, chunk: Chunk, features: Tensor, tokens: Tensor, roots: Tensor | None
    ) -> list[Tensor]:
        return [self._forward(tokens, self.head.fuse(features), chunk.positions, chunk.seen)]

    @torch.no_grad()
    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        tokens, above, sizes = self.drafted.extend(frontiers)
        self.positions = self.positions + 1
        if self.vocabulary is not None:
            tokens = self.vocabulary[tokens]
        features = rows_of(self.frontier, above)
        self.frontier = self._forward(tokens, features, self.positions, self.drafted.seen)
        logits = self.head.logits(unpadded(self.frontier, sizes), self.target)
        return list(logits.split(sizes))

    def _forward(self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """One step of the head; its keys and values stay in the cache. Returns [B, T, H].

        tokens: [B, T]. features: [B, T, H]. positions: [B, T or 1]. mask: [B, T, P + T].
        """
        layers = self.cache.tree_layers
        hidden = self.head.step(tokens, features, positions, mask[:, None], layers)
        for layer in layers:
            layer.length += tokens.shape[1]
        return hidden
