"""Layers that compute and change nothing: the same text from a target whose forwards cost more.

One trained pair of target and head then shows how the speedup grows with the cost of the target. A
decoder layer adds its outputs to the residual stream; with zero output projections it adds zeros:

    layer 0 … L - 1      x + attention(x) + MLP(x)     as trained
    layer L … L + n - 1  x + 0 + 0                     the same matrix products but for the zeros
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from treespec.errors import InputError, first_line
from treespec.model.packed import PackedLinear
from treespec.target import Target

LINEAR = (nn.Linear, Conv1D, PackedLinear)
Module = TypeVar("Module", bound=nn.Module)


@torch.no_grad()
def pad(target: Target, layers: int) -> float:
    """Append `layers` copies of the target's last layer that write zeros into the residual stream.

    Returns the largest change of a logit; 0.0: the logits are the same to the bit. Caches made
    before the call have too few layers after it. Raises InputError, and leaves the target as it
    was, if the logits change by more than rounding or the model does not run the copies.
    """
    # 1. The projections that write into the residual stream, found by running the last layer.
    if not layers:
        return 0.0
    model, config, before = target.model, target.config, target.layers
    if any(weight.is_meta for weight in model.parameters()):
        raise InputError(
            "--pad-layers: the target's weights are offloaded; give it room on its devices"
        )
    stack = stack_of(target)
    layer_types = list(getattr(config, "layer_types", None) or [])
    with running(stack[-1]) as calls:
        logits = _logits(model)
    writers = output_projections(calls)

    # 2. The copies, and a forward that must run them and give the same logits.
    try:
        if not writers:
            raise ValueError("its layers run no linear modules")
        for number in range(before, before + layers):
            stack.append(_silent(stack[before - 1], writers, number))
        _set_layers(config, before + layers, layer_types + layer_types[-1:] * layers)
        with running(stack[-1]) as calls:
            padded = _logits(model)
        if not calls:
            raise ValueError("it does not run layers that are appended")
        difference = float((padded - logits).abs().max())
        if not difference <= 16 * torch.finfo(model.dtype).eps * float(logits.abs().max()):
            change = f"its logits change by {difference:.3g}"
            raise ValueError(f"{change}, so its layers write by other ways than these")

    # 3. On any error the target as it was.
    except Exception as error:  # a model that checks its number of layers raises any class of error
        del stack[before:]
        _set_layers(config, before, layer_types)
        raise InputError(
            f"--pad-layers: {type(model).__name__} cannot be padded "
            f"({', '.join(writers) or 'nothing'} of its layers silenced): {first_line(error)}"
        ) from error
    target.layers = before + layers
    return difference


def stack_of(target: Target) -> nn.ModuleList:
    """The decoder's list of layers."""
    stacks = (module for module in target.decoder.modules() if isinstance(module, nn.ModuleList))
    return next(stack for stack in stacks if len(stack) == target.layers)


@contextmanager
def running(layer: nn.Module) -> Iterator[list[str]]:
    """A list that collects the names of the layer's linear modules as they run."""
    calls: list[str] = []

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda module, inputs: calls.append(name)

    linear = {name: module for name, module in layer.named_modules() if isinstance(module, LINEAR)}
    handles = [module.register_forward_pre_hook(keep(name)) for name, module in linear.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def output_projections(calls: list[str]) -> list[str]:
    """The linear module that ran last in each part of a layer (attention, MLP).

    Modules directly below the layer (OPT's MLP) are one part together.
    """
    last = {name.rpartition(".")[0].partition(".")[0]: name for name in calls}
    return list(last.values())


def _silent(layer: nn.Module, writers: list[str], number: int) -> nn.Module:
    """A copy of a layer, as layer `number`, whose modules named `writers` give zeros."""
    # 1. The copy. deepcopy cannot copy packed weights: hand it clones.
    packed = [module.packed for module in layer.modules() if isinstance(module, PackedLinear)]
    silent = copy.deepcopy(layer, {id(weight): weight.clone() for weight in packed})

    # 2. Its number, under which its modules find their cache.
    for module in silent.modules():
        if isinstance(vars(module).get("layer_idx"), int):
            vars(module)["layer_idx"] = number

    # 3. Zeros.
    for name in writers:
        linear = silent.get_submodule(name)
        if isinstance(linear, PackedLinear):
            bias = linear.bias is not None
            linear = nn.Linear(
                linear.in_features, linear.out_features, bias, dtype=linear.packed.dtype
            )
            silent.set_submodule(name, PackedLinear(_zero(linear)))
        else:
            _zero(linear)
    return silent


def _zero(linear: Module) -> Module:
    """The module, its weight and bias set to zero."""
    for parameter in linear.parameters():
        parameter.zero_()
    return linear


def _set_layers(config: PreTrainedConfig, layers: int, layer_types: list[str]) -> None:
    """Write the number of layers and their types into a config. layer_types: [] if it has none."""
    changes = {"num_hidden_layers": layers} | ({"layer_types": layer_types} if layer_types else {})
    config.update(changes)


def _logits(model: PreTrainedModel) -> Tensor:
    """[8, V] float32 logits of eight fixed tokens."""
    vocab_size = model.config.get_text_config().vocab_size
    tokens = torch.arange(3, 11, device=model.device)[None] % vocab_size
    return model(input_ids=tokens, use_cache=False).logits[0].float()
