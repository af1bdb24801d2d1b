"""Scaled dot-product attention under a tree mask: on a CPU by our kernels, else by torch."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
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

    query: [B, heads, N, D]. key, value: [B, KV heads, T, D]. attention_mask: [B or 1, 1, N, T],
    additive. transformers' own function runs where the kernels do not.
    """
    n, t = query.shape[2], key.shape[2]
    if query.is_cpu and options.get("position_bias") is None:
        mask = attention_mask
        if mask is None and options.get("is_causal", getattr(module, "is_causal", False)):
            mask = torch.ones(1, 1, n, t, dtype=torch.bool).tril(t - n)
        if mask is not None:
            mask = additive(mask, query.dtype) if mask.dtype == torch.bool else mask
            scale = options.get("scaling") or query.shape[-1] ** -0.5
            if (own := kernels.attention(query, key, value, mask, scale)) is not None:
                return own, None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def take_trees(model: PreTrainedModel) -> None:
    """Let a decoder with transformers' sdpa attention use `tree_attention`.

    Other parts of the model keep their attention: an audio tower may accept no other. Indexed
    attention keeps its own, as it leaves the index out in any but those that it knows.
    """
    config = model.config.get_text_config()
    indexed = "indexed_attention" in (getattr(config, "layer_types", None) or ())
    if config._attn_implementation == "sdpa" and not indexed:
        AttentionInterface.register(NAME, tree_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        decoder = model.get_decoder()
        (decoder if isinstance(decoder, PreTrainedModel) else model).set_attn_implementation(NAME)
