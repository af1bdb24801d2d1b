"""What a forward of the target gives: hidden states, the inputs of tapped layers, logits."""

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
    features: [N, H] hidden states after the final norm, or [N, taps * H] for a head that taps
    layers.
    rows: [asked, V] logits of the tree's extra rows, if it has any.
    """

    logits: Tensor
    features: Tensor
    rows: Tensor | None = None


@contextmanager
def captured(layers: nn.ModuleList, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """Inside, the dict receives the input of each tapped layer of a forward.

    taps: layer numbers k. The input of layer k is transformers' hidden_states[k], [B, N, H].
    """
    inputs: dict[int, Tensor] = {}

    def keep(k: int) -> Hook:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            inputs[k] = args[0] if args else kwargs["hidden_states"]

        return hook

    handles = [layers[k].register_forward_pre_hook(keep(k), with_kwargs=True) for k in taps]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


def tapped(
    decoder: nn.Module, layers: nn.ModuleList, arguments: dict[str, Any], taps: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """One forward of the decoder over B trees of N nodes, with these arguments.

    taps: as for `captured`. Returns the hidden states after the final norm [B, N, H], and the
    features: these same states, or the tapped inputs side by side, [B, N, taps * H].
    """
    with captured(layers, taps) as inputs:
        hidden = decoder(**arguments).last_hidden_state
    if not taps:
        return hidden, hidden
    return hidden, torch.cat([inputs[k].to(hidden.device) for k in taps], dim=-1)


def scaled(logits: Tensor, config: PreTrainedConfig) -> Tensor:
    """Logits after the factors and the cap of a config (Cohere, Granite, Gemma)."""
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if scale := getattr(config, "logits_scaling", None):
        logits = logits / scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits
