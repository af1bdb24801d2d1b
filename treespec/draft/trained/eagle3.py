"""A new EAGLE-3 head for a target."""

import torch
from torch import nn

from treespec.draft.trained.eagle import embedding_of
from treespec.heads.eagle3 import Eagle3Head, config_for, default_taps
from treespec.heads.head import Config
from treespec.model.target import Target


def new_head(target: Target, parts: Config | None = None) -> Eagle3Head:
    """An untrained head in float32, with the target's embedding, that drafts all tokens.

    parts: fields of its config.json, for a head that is not EAGLE-3 as published (`Eagle3Head`).

    Its output layer starts as a copy of the target's if their widths agree. Raises InputError if
    the embedding or the output embedding is offloaded, or the latter is no plain linear layer.
    """
    embedding = embedding_of(target)
    taps = default_taps(target.layers)
    config = config_for(
        target.config, embedding.shape[1], target.vocab_size, taps, target.embed_scale
    )
    head = Eagle3Head(config | (parts or {}))
    assert head.embed_tokens is not None
    head.embed_tokens.weight = embedding
    output = target.output_rows(torch.arange(target.vocab_size))
    if output.in_features == head.hidden_size:
        head.lm_head.weight = nn.Parameter(output.weight.float())
    return head
