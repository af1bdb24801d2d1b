"""Scaled dot-product attention under a tree mask: on a CPU by our kernels, else by torch."""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from treespec.kernels import ops as kernels
from treespec.model.masks import additive
from treespec.model.placement import device_of

NAME = "trees"  # without "sdpa": transformers refuses that to models with caps or sinks
# torch's sdpa has neither; transformers computes them step by step.
CAPS_OR_SINKS = [
    "flint",
    "gemma2",
    "gpt_oss",
    "granite_swa",
    "granitemoe_swa",
    "mimo_v2_flash",
    "vaultgemma",
]


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention over N nodes. Returns [B, N, heads, D].

    query: [B, heads, N, D]. key, value: [B, KV heads, T, D]. attention_mask: [B or 1, 1, N, T or
    fewer], additive, of the last columns; all nodes see those before. transformers' own function
    runs where the kernels do not.
    """
    n = query.shape[2]
    t = key.shape[2]
    cap = options.get("softcap") or 0.0
    sinks = options.get("s_aux")
    if query.is_cpu and options.get("position_bias") is None:
        mask = attention_mask
        if mask is None and options.get("is_causal", getattr(module, "is_causal", False)):
            mask = torch.ones(1, 1, n, t, dtype=torch.bool).tril(t - n)
        if mask is not None:
            mask = additive(mask, query.dtype) if mask.dtype == torch.bool else mask
            scale = options.get("scaling") or query.shape[-1] ** -0.5
            beside = (cap, sinks)
            own = kernels.attention(query, key, value, mask, scale, beside)
            if own is not None:
                return own, None
        if cap or sinks is not None:
            own = sys.modules[type(module).__module__].eager_attention_forward
            return own(module, query, key, value, whole(mask, t), **options)
    # In a graph, without the copies of keys and values that transformers makes for each query head.
    plain = attention_mask is not None and options.get("position_bias") is None
    fast = query.is_cuda and torch.backends.cuda.cudnn_sdp_enabled()
    if fast and plain and query.dtype != torch.float32:
        how: Any = {"scale": options.get("scaling"), "enable_gqa": True}
        out = scaled_dot_product_attention(query, key, value, attention_mask, **how)
        return out.transpose(1, 2), None
    return sdpa_attention_forward(module, query, key, value, whole(attention_mask, t), **options)


def whole(mask: Tensor | None, columns: int) -> Tensor | None:
    """[B, 1, N, T] a mask of all columns from an additive one of the last."""
    if mask is None or mask.shape[-1] == columns:
        return mask
    return pad(mask, (columns - mask.shape[-1], 0))


def take_trees(model: PreTrainedModel) -> None:
    """Let a decoder with transformers' sdpa attention use `tree_attention`; on a CPU also one with
    soft caps or sinks.

    Other parts of the model keep their attention: an audio tower may accept no other. Indexed
    attention keeps its own, as it leaves the index out in any but those that it knows.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)  # 45 ms for each new length; graphs turn it on
    config = model.config.get_text_config()
    indexed = "indexed_attention" in (getattr(config, "layer_types", None) or ())
    beside = (
        config.model_type in CAPS_OR_SINKS and device_of(model).type == "cpu" and kernels.library()
    )
    if (beside or config._attn_implementation == "sdpa") and not indexed:
        AttentionInterface.register(NAME, tree_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        decoder = model.get_decoder()
        (decoder if isinstance(decoder, PreTrainedModel) else model).set_attn_implementation(NAME)
