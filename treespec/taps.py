"""Hidden states from within a model, by hooks on its layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


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
