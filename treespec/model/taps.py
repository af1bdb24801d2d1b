"""A decoder's forward, with what goes into the layers that a head taps."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache


@contextmanager
def captured(layers: nn.ModuleList, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """Inside, layer k's input (transformers' hidden_states[k]) is put under k in the dict, for every tap."""
    inputs: dict[int, Tensor] = {}

    def keep(k: int) -> Any:
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
    decoder: nn.Module,
    layers: nn.ModuleList,
    cache: Cache,
    tokens: Tensor,
    positions: Tensor,
    masks: Any,
    taps: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """The decoder over [B, N] nodes behind a cache: hidden states after the final norm, and features."""
    with captured(layers, taps) as inputs:
        hidden = decoder(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=masks,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
    if not taps:
        return hidden, hidden
    return hidden, torch.cat([inputs[k].to(hidden.device) for k in taps], dim=-1)
