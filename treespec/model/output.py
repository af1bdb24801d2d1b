"""What a forward of the target gives: hidden states, the inputs of aux layers, logits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

Hook = Callable[[nn.Module, tuple, dict], None]


@dataclass(frozen=True)
class TreeOutput:
    """The target's forward over one tree.

    logits: [N, V].
    features: [N, H] hidden states after the final norm, or [N, aux_layers * H] for a head that reads
    layers.
    """

    logits: Tensor
    features: Tensor


@contextmanager
def captured(layers: nn.ModuleList, aux_layers: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """Inside, the dict receives the input of each aux layer of a forward.

    aux_layers: layer numbers k. The input of layer k is transformers' hidden_states[k], [B, N, H].
    The number of layers L stands for what the last layer gives, before the final norm.
    """
    inputs: dict[int, Tensor] = {}

    def keep(k: int) -> Hook:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            inputs[k] = args[0] if args else kwargs["hidden_states"]

        return hook

    def keep_last(module: nn.Module, args: tuple, out: Any) -> None:
        inputs[len(layers)] = out[0] if isinstance(out, tuple) else out

    handles = [
        layers[k].register_forward_pre_hook(keep(k), with_kwargs=True)
        for k in aux_layers
        if k < len(layers)
    ]
    if len(layers) in aux_layers:
        handles.append(layers[-1].register_forward_hook(keep_last))
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


def forward_with_features(
    decoder: nn.Module,
    layers: nn.ModuleList,
    arguments: dict[str, Any],
    aux_layers: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """One forward of the decoder over B trees of N nodes, with these arguments.

    aux_layers: as for `captured`. Returns the hidden states after the final norm [B, N, H], and the
    features: these same states, or these inputs side by side, [B, N, aux_layers * H].
    """
    with captured(layers, aux_layers) as inputs:
        hidden = decoder(**arguments).last_hidden_state
    if not aux_layers:
        return hidden, hidden
    return hidden, torch.cat([inputs[k].to(hidden.device) for k in aux_layers], dim=-1)


def scaled(logits: Tensor, config: PreTrainedConfig) -> Tensor:
    """Logits after the factors and the cap of a config (Cohere, Granite, Gemma)."""
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if scale := getattr(config, "logits_scaling", None):
        logits = logits / scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits
