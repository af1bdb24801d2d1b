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
from treespec.model.layer_types import INDEXED_ATTENTION, get_layer_types
from treespec.model.masks import to_additive_mask
from treespec.model.placement import find_device_of

ATTENTION_NAME = "trees"  # without "sdpa": transformers refuses that to models with caps or sinks
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


def attend_tree(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend over N nodes, by the kernels if they take the tensors, else by transformers' function.

    Args:
        module: the attention module.
        query: [B, heads, N, D].
        key, value: [B, KV heads, T, D].
        attention_mask: [B or 1, 1, N, T or fewer], additive, of the last columns; all nodes see the earlier columns.
        options: as transformers passes them, such as `scaling`.

    Returns: [B, N, heads, D], and no weights.
    """
    if query.is_cpu and options.get("position_bias") is None:
        output = attend_on_cpu(module, query, key, value, attention_mask, options)
        if output is not None:
            return output, None
    elif can_use_cudnn(query, attention_mask, options):
        # In a graph, without the copies of keys and values that transformers makes for each query head.
        by_head = scaled_dot_product_attention(
            query, key, value, attention_mask, scale=options.get("scaling"), enable_gqa=True
        )
        return by_head.transpose(1, 2), None
    mask = expand_mask(attention_mask, key.shape[2])
    return sdpa_attention_forward(module, query, key, value, mask, **options)


def attend_on_cpu(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor | None:
    """`attend_tree` by our kernels, or by the model's eager attention if it has caps or sinks.

    Arguments as for `attend_tree`. Returns [B, N, heads, D]; None if neither applies.
    """
    n = query.shape[2]
    t = key.shape[2]
    cap = options.get("softcap")
    if cap is None:
        cap = 0.0
    sinks = options.get("s_aux")
    mask = attention_mask
    if mask is None and options.get("is_causal", getattr(module, "is_causal", False)):
        mask = torch.ones(1, 1, n, t, dtype=torch.bool, device="cpu").tril(t - n)
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = to_additive_mask(mask, query.dtype)
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        output = kernels.attend_packed(query, key, value, mask, scale, cap, sinks)
        if output is not None:
            return output
    if cap or sinks is not None:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, expand_mask(mask, t), **options)[0]
    return None


def can_use_cudnn(query: Tensor, attention_mask: Tensor | None, options: dict[str, Any]) -> bool:
    """Whether torch's attention needs no copies of keys and values: on CUDA, inside a graph."""
    if not query.is_cuda or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    if attention_mask is None or options.get("position_bias") is not None:
        return False
    return query.dtype != torch.float32


def expand_mask(mask: Tensor | None, columns: int) -> Tensor | None:
    """Widen an additive mask of the last columns to [B, 1, N, T]; all nodes see the earlier columns.

    Five columns, and a mask of the last three:

        node 0    . . .    to    0 0 . . .
    """
    if mask is None or mask.shape[-1] == columns:
        return mask
    return pad(mask, (columns - mask.shape[-1], 0))


def take_trees(model: PreTrainedModel) -> None:
    """Make a decoder with transformers' sdpa attention use `attend_tree`; on a CPU also a decoder with
    soft caps or sinks.

    Other parts of the model keep their attention: an audio tower may accept no other. Indexed
    attention keeps its implementation, because it ignores the index in implementations that it does not know.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)  # 45 ms for each new length; graphs turn it on
    if not can_take_trees(model):
        return
    AttentionInterface.register(ATTENTION_NAME, attend_tree)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    decoder = model.get_decoder()
    if isinstance(decoder, PreTrainedModel):
        decoder.set_attn_implementation(ATTENTION_NAME)
    else:
        model.set_attn_implementation(ATTENTION_NAME)


def can_take_trees(model: PreTrainedModel) -> bool:
    """Whether a model's attention can become `attend_tree`."""
    config = model.config.get_text_config()
    if INDEXED_ATTENTION in get_layer_types(config):
        return False
    if config._attn_implementation == "sdpa":
        return True
    has_caps_or_sinks = config.model_type in CAPS_OR_SINKS
    return (
        has_caps_or_sinks and find_device_of(model).type == "cpu" and bool(kernels.load_kernels())
    )
