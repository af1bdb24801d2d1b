"""Scaled dot-product attention under a tree mask, without a copy of the keys and values for every query head.

transformers repeats a cache for grouped heads where a mask is given, a pass over all of it at every layer. Here the
query heads that share a key-value head stand below one another instead. Three heads a group, two nodes:

    query head    a a b b c c  of one key-value head
    node          0 1 0 1 0 1     and the mask's rows 0 1 repeated three times
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_tree"


def tree_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """query: [B, heads, N, D]; key, value: [B, key-value heads, T, D]. Returns [B, N, heads, D].

    attention_mask: [B or 1, 1, N, T], additive. Without one, or with anything else, it is transformers' function; so it
    is for so many nodes that to repeat the mask for every head of a group would copy more than keys and values.
    """
    groups = query.shape[1] // key.shape[1]
    plain = attention_mask is None or attention_mask.shape[1] > 1 or options.get("position_bias") is not None
    if plain or groups == 1 or query.shape[2] > 2 * key.shape[1] * key.shape[3]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    assert attention_mask is not None
    stacked = query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])
    mask = attention_mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(stacked, key, value, attn_mask=mask, scale=options.get("scaling"))
    return out.reshape(*query.shape[:3], value.shape[-1]).transpose(1, 2).contiguous(), None


def stack_query_heads(model: PreTrainedModel) -> None:
    """Let a model that was loaded with transformers' sdpa attention use `tree_attention`."""
    if model.config.get_text_config()._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, tree_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
