"""A decoder's forward that also returns the inputs of the layers that a head taps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Hook = Callable[[nn.Module, tuple, dict], None]


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
