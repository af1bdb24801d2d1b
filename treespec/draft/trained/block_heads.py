"""New block heads for a target, and how one drafts along a given text."""

from collections.abc import Iterator

import torch
from torch import Tensor

from treespec.draft.trained.block import BlockProposer
from treespec.draft.trained.eagle import embedding_of
from treespec.draft.vocabulary import whole
from treespec.heads import eagle, eagle3
from treespec.heads.block import BlockHead
from treespec.heads.dflash import DFlashHead
from treespec.heads.p_eagle import PEagleHead
from treespec.model.target import Target


def new_dflash(target: Target, block_size: int = 8, layers: int = 1) -> DFlashHead:
    """An untrained head for a target, in float32, without an embedding or output of its own."""
    fields = eagle.config_for(target.config, target.feature_width, target.vocab_size)
    head = DFlashHead(
        fields
        | {
            "model_type": "dflash",
            "num_hidden_layers": layers,
            "taps": list(eagle3.default_taps(target.layers)),
            "block_size": block_size,
            "mask_token_id": target.vocab_size - 1,
            "target_hidden_size": target.config.hidden_size,
        }
    )
    head.embed_tokens = None
    return head


def new_p_eagle(target: Target, levels: int = 8) -> PEagleHead:
    """An untrained head for a target, in float32, with the target's embedding."""
    taps = eagle3.default_taps(target.layers)
    embedding = embedding_of(target)
    fields = eagle3.config_for(
        target.config, embedding.shape[1], target.vocab_size, taps, target.embed_scale
    )
    own = {"model_type": "p-eagle", "levels": levels, "mask_token_id": target.vocab_size - 1}
    head = PEagleHead(fields | own)
    assert head.eagle3.embed_tokens is not None
    head.eagle3.embed_tokens.weight = embedding
    return head


@torch.no_grad()
def block_rollout(
    head: BlockHead, target: Target, tokens: Tensor, features: Tensor, steps: int
) -> Iterator[Tensor]:
    """`Kind.rollout`: step d is level d of the block below each position in turn."""
    rows = len(tokens) - steps - 1
    if rows <= 0:
        return
    proposer, states = BlockProposer(head, target), []
    for row in range(rows):
        proposer.observe([features[row : row + 1]], [tokens[row : row + 2]])
        drafted = proposer.states(tokens[row + 1 : row + 2])
        assert drafted is not None
        states.append(drafted[0])
    levels = torch.stack(states, dim=1)  # [D, R, H]
    for level in range(steps):
        yield whole(head.logits(levels[level], target), head, target)
