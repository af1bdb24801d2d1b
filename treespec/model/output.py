"""From hidden states to logits, by a model's own output path."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from treespec.errors import InputError


@dataclass(frozen=True)
class TreeOutput:
    """The target's forward over one tree.

    logits: [N, V].
    features: [N, H] hidden states after the final norm, or [N, taps * H] for a head that taps
    layers.
    rows: [asked, V] logits of the tree's extra rows, if it has any.
    """

    logits: Tensor
    features: Tensor
    rows: Tensor | None = None


def rows_of_output(model: PreTrainedModel, tokens: Tensor, device: torch.device) -> nn.Linear:
    """A copy of the output embedding's rows for the tokens [N], a linear layer H -> N.

    Raises InputError for an output embedding that is offloaded, or is no plain linear layer.
    """
    whole = model.get_output_embeddings()
    reason = None
    if not isinstance(whole, nn.Linear):
        reason = "is no plain linear layer"
    elif whole.weight.is_meta:
        reason = "is offloaded: give it room on a device"
    if reason or not isinstance(whole, nn.Linear):
        raise InputError(
            f"{type(model).__name__} takes no draft vocabulary: its output embedding {reason}"
        )
    rows = nn.Linear(whole.in_features, len(tokens), bias=whole.bias is not None, device="meta")
    for name, value in whole.named_parameters():
        values = value.detach()[tokens.to(value.device)].to(device)
        setattr(rows, name, nn.Parameter(values, requires_grad=False))
    return rows


def scaled(logits: Tensor, config: PreTrainedConfig) -> Tensor:
    """Logits after the factors and the cap of a config (Cohere, Granite, Gemma)."""
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if scale := getattr(config, "logits_scaling", None):
        logits = logits / scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits
