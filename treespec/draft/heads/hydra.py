"""Drafts with Hydra's heads: the logits of a node depend on the tokens of the path to it."""

from typing import final

import torch
from torch import Tensor

from treespec.draft.heads.base import DeepeningProposer
from treespec.heads.hydra import HydraHead
from treespec.model.masks import Chunk, gather_rows


@final
class HydraProposer(DeepeningProposer):
    """Drafts with one head per level, which reads the embeddings along a node's path.

    Five tokens a b c d e, the root e; h3 is the state at d. A path x y below e:

        level    inputs                           drafts
        0        h3, e                            x
        1        h3, e, x                         y
        2        h3, e, x, y                      the token after y

    Hydra++'s prefix layer attends over the hidden states up to a position; `cache` holds its keys and values.

    Attributes:
        inputs: [B, F, (level + 2) H] the state, and the embeddings along the path to each frontier node.
        level: the depth of the frontier.
    """

    head: HydraHead
    inputs: Tensor
    level = 0

    def run_layers(
        self, chunk: Chunk, features: Tensor, tokens: Tensor, roots: Tensor | None
    ) -> Tensor:
        for layer in self.cache.tree_layers:
            features = self.head.prepare_states(
                features, chunk.positions, chunk.seen[:, None], layer
            )
        return features

    def draft_first_level(self, last: Tensor, roots: Tensor) -> Tensor:
        self.level = 0
        embedded = self.target.embed_tokens(roots).to(last.dtype)
        self.inputs = torch.cat([last, embedded], dim=-1)[:, None]
        return self.compute_draft_logits(self.inputs)

    def draft_next_states(self, tokens: Tensor, above: Tensor) -> Tensor:
        embedded = self.target.embed_tokens(tokens).to(self.inputs.dtype)
        self.inputs = torch.cat([gather_rows(self.inputs, above), embedded], dim=-1)
        self.level += 1
        return self.inputs

    def compute_draft_logits(self, states: Tensor) -> Tensor:
        return self.head.compute_step_logits(self.level, states)
