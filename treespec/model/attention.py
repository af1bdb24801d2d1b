"""Scaled dot-product attention under a tree mask, without copies of keys and values.

Where query heads share a KV head and a mask is given, transformers copies the keys and values for
each query head, at every layer. Here the query heads of a group are stacked as further rows of one
head instead. Two query heads a and b of one KV head, over five nodes:

    row           0 1 2 3 4 5 6 7 8 9
    query head    a a a a a b b b b b
    node          0 1 2 3 4 0 1 2 3 4       the mask's rows 0 to 4, repeated once

The repeated mask is built once a forward and used by all layers.
"""

from typing import Any

import torch
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

from treespec.model import kernels
from treespec.model.masks import additive

NAME = "sdpa_tree"


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention over N nodes. Returns [B, N, heads, D].

    query: [B, heads, N, D]. key, value: [B, KV heads, T, D].
    attention_mask: [B or 1, 1, N, T], additive, or with its rows repeated for each query head of a
    group (`repeats`).
    transformers' own function runs where the mask is missing or of another shape, and for more than
    `most_nodes` nodes.
    """
    # 1. The kernels of a CPU; else, is stacking possible, and does it pay?
    n, groups = query.shape[2], query.shape[1] // key.shape[1]
    mask = None if attention_mask is None else attention_mask[:, :, :n]
    is_biased = options.get("position_bias") is not None
    if query.is_cpu and not is_biased:
        seen = mask
        if mask is None and options.get("is_causal", getattr(module, "is_causal", False)):
            seen = torch.ones(1, 1, n, key.shape[2], dtype=torch.bool).tril(key.shape[2] - n)
        if seen is not None:
            seen = additive(seen, query.dtype) if seen.dtype == torch.bool else seen
            scale = options.get("scaling") or query.shape[-1] ** -0.5
            if (own := kernels.attention(query, key, value, seen, scale)) is not None:
                return own, None
    too_many = groups == 1 or n > most_nodes(key.shape[1], key.shape[3])
    if mask is None or attention_mask is None or mask.shape[1] > 1 or is_biased or too_many:
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    # 2. One head of groups * N rows, under the repeated mask.
    stacked = query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])
    is_repeated = attention_mask.shape[2] == groups * n
    mask = attention_mask if is_repeated else mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(
        stacked, key, value, attn_mask=mask, scale=options.get("scaling")
    )
    return out.reshape(*query.shape[:3], value.shape[-1]).transpose(1, 2).contiguous(), None


def most_nodes(heads: int, width: int) -> int:
    """The largest number of nodes for which stacking query heads pays.

    For more nodes the repeated mask is larger than the copied keys and values.
    heads: KV heads. width: D, the size of a head.
    """
    return max(128, 2 * heads * width)


def repeats(config: PreTrainedConfig, nodes: int) -> int:
    """How often to repeat the rows of a mask over `nodes` nodes, for all layers of a model.

    1 where the model does not use `tree_attention`, and where its layers differ.
    """
    try:
        heads, queries = getattr(config, "num_key_value_heads", None), config.num_attention_heads
        width = getattr(config, "head_dim", None)
    except Exception:  # Gemma 4: sizes differ by layer, and its config raises an error of its own
        return 1
    if config._attn_implementation != NAME or not heads:
        return 1
    width = width or config.hidden_size // queries
    return queries // heads if nodes <= most_nodes(heads, width) else 1


def stack_query_heads(model: PreTrainedModel) -> None:
    """Let a decoder with transformers' sdpa attention use `tree_attention`.

    Other parts of the model keep their attention: an audio tower may accept no other. Indexed
    attention keeps its own, as it leaves the index out in any but those that it knows.
    """
    if "indexed_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
        return
    if model.config.get_text_config()._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, tree_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        decoder = model.get_decoder()
        (decoder if isinstance(decoder, PreTrainedModel) else model).set_attn_implementation(NAME)
