"""Scaled dot-product attention under a tree mask, without a copy of the keys and values for every query head.

transformers repeats a cache for grouped heads where a mask is given, a pass over all of it at every layer. Here the
query heads that share a key-value head stand below one another instead. Three heads a group, two nodes:

    query head    a a b b c c  of one key-value head
    node          0 1 0 1 0 1     and the mask's rows 0 1 repeated three times, once for all layers
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_tree"


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query: [B, heads, N, D]; key, value: [B, key-value heads, T, D]. Returns [B, N, heads, D].

    attention_mask: [B or 1, 1, N, T], additive, or its rows repeated for each head of a group (`repeats`).
    transformers' own function runs where the mask is missing or of another shape, and beyond `most_nodes`.
    """
    n, groups = query.shape[2], query.shape[1] // key.shape[1]
    own = None if attention_mask is None else attention_mask[:, :, :n]
    plain = own is None or own.shape[1] > 1 or options.get("position_bias") is not None
    if plain or groups == 1 or n > most_nodes(key.shape[1], key.shape[3]):
        return sdpa_attention_forward(module, query, key, value, own, **options)
    assert own is not None
    assert attention_mask is not None
    stacked = query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])
    mask = attention_mask if attention_mask.shape[2] == groups * n else own.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(
        stacked, key, value, attn_mask=mask, scale=options.get("scaling")
    )
    return out.reshape(*query.shape[:3], value.shape[-1]).transpose(1, 2).contiguous(), None


def most_nodes(heads: int, width: int) -> int:
    """Nodes up to which stacking query heads pays: beyond, repeating the mask copies more than the keys and values.

    heads: KV heads. width: of a head.
    """
    return max(128, 2 * heads * width)


def repeats(config: PreTrainedConfig, nodes: int) -> int:
    """How often to repeat each row of a mask over `nodes` for a model's layers; 1 where layers differ."""
    try:
        heads, queries = getattr(config, "num_key_value_heads", None), config.num_attention_heads
        width = getattr(config, "head_dim", None)
    except (
        Exception
    ):  # Gemma 4: sizes differ from layer to layer, the config raises an error of its own
        return 1
    if config._attn_implementation != NAME or not heads:
        return 1
    width = width or config.hidden_size // queries
    return queries // heads if nodes <= most_nodes(heads, width) else 1


def stack_query_heads(model: PreTrainedModel) -> None:
    """Let a decoder that was loaded with transformers' sdpa attention use `tree_attention`.

    The decoder alone: beside it a model may have an audio tower that takes no other attention than its own.
    """
    if model.config.get_text_config()._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, tree_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        decoder = model.get_decoder()
        (decoder if isinstance(decoder, PreTrainedModel) else model).set_attn_implementation(NAME)
