"""What a model says of itself: whether it can hold a tree, its layers, windows and end tokens."""

import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from treespec.errors import InputError

HOLDS_TREE = {"full_attention", "sliding_attention", "chunked_attention"}


def refuse_what_cannot_branch(model: PreTrainedModel) -> None:
    """Raise InputError, with the reason, for a model whose forward cannot score a tree."""
    name, config = type(model).__name__, model.config.get_text_config()
    reason = None
    foreign = sorted(set(getattr(config, "layer_types", None) or []) - HOLDS_TREE)
    if getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder; treespec takes decoder-only models"
    elif foreign or getattr(model, "_is_stateful", False):
        layers = ", ".join(foreign) or "recurrent"
        reason = f"its {layers} layers carry one state from token to token, which cannot branch into a tree"
    elif getattr(config, "alibi", False) or not _takes_positions(model):
        reason = "it places tokens by their column in the cache (ALiBi), where siblings cannot share a position"
    elif "local" in str(getattr(config, "attention_types", "")):
        reason = "its local attention counts columns of the cache, where siblings cannot share a position"
    elif "flash" in str(config._attn_implementation) or "flex" in str(config._attn_implementation):
        reason = f"its attention ({config._attn_implementation}) takes no tree mask; load it with sdpa or eager"
    if reason:
        raise InputError(f"{name} cannot be a target: {reason}")


def _takes_positions(model: PreTrainedModel) -> bool:
    return "position_ids" in inspect.signature(decoder_of(model).forward).parameters


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The stack of layers below the output embedding."""
    candidates = (model.get_decoder(), model.base_model, getattr(model, "model", None))
    return next(module for module in candidates if module is not None and module is not model)


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that end a text: generation_config's, else the config's."""
    settings = (getattr(model, "generation_config", None), model.config.get_text_config())
    for eos in (getattr(s, "eos_token_id", None) for s in settings):
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()


def layer_windows(config: Any) -> dict[str, int | None]:
    """Layer type -> window or chunk, for every type of attention layer that the model has."""
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    sizes = {"sliding_attention": window, "chunked_attention": getattr(config, "attention_chunk_size", None)}
    return {kind: sizes.get(kind) for kind in sorted(kinds)}
