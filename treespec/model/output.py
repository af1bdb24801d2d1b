"""From hidden states to logits, by a model's own output path."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from treespec.errors import InputError


def rows_of_output(model: PreTrainedModel, tokens: Tensor, device: torch.device) -> nn.Linear:
    """A copy of the output embedding for the tokens [N] alone, H -> N.

    Raises InputError for an output embedding that is offloaded, or no plain linear layer (any more).
    """
    whole = model.get_output_embeddings()
    if not isinstance(whole, nn.Linear) or whole.weight.is_meta:
        why = (
            "is offloaded: give it room on a device"
            if isinstance(whole, nn.Linear)
            else "is no plain linear layer"
        )
        raise InputError(
            f"{type(model).__name__} takes no draft vocabulary: its output embedding {why}"
        )
    rows = nn.Linear(whole.in_features, len(tokens), bias=whole.bias is not None, device="meta")
    for name, value in whole.named_parameters():
        own = value.detach()[tokens.to(value.device)].to(device)
        setattr(rows, name, nn.Parameter(own, requires_grad=False))
    return rows


def scaled(logits: Tensor, config: Any) -> Tensor:
    """Logits after the factors and the cap that a config names (Cohere, Granite, Gemma)."""
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if scale := getattr(config, "logits_scaling", None):
        logits = logits / scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits
