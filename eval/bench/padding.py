"""Layers that compute and change nothing: the same text from a target that costs more.

One trained pair of target and head then shows how the speedup grows as the target gets costlier.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from treespec.errors import InputError, first_line
from treespec.model.packed import PackedLinear
from treespec.target import Target

LINEAR = (nn.Linear, Conv1D, PackedLinear)
Module = TypeVar("Module", bound=nn.Module)


@torch.no_grad()
def pad(target: Target, layers: int) -> float:
    """Append `layers` copies of a target's last layer, with nothing but zeros written into the residual stream.

    The projections that write there are found by running the layer: the last linear one of each of its parts
    (attention, MLP). Returns the largest difference of a logit from before, 0.0 where they are the same to the bit.
    Raises InputError, and leaves the target as it was, where the logits differ by more than rounding or a copy is
    not run. Caches made before are of no use after.
    """
    if not layers:
        return 0.0
    model, config, before = target.model, target.config, target.layers
    if any(weight.is_meta for weight in model.parameters()):
        raise InputError(
            "--pad-layers: the target's weights are offloaded; give it room on its devices"
        )
    stack = stack_of(target)
    kinds = list(getattr(config, "layer_types", None) or [])
    with recorded(stack[-1]) as calls:
        plain = _logits(model)
    written = outputs(calls)
    try:
        if not written:
            raise ValueError("its layers run no linear modules")
        for number in range(before, before + layers):
            stack.append(_silent(stack[before - 1], written, number))
        _say(config, before + layers, kinds + kinds[-1:] * layers)
        with recorded(stack[-1]) as calls:
            padded = _logits(model)
        if not calls:
            raise ValueError("it does not run layers that are appended")
        difference = float((padded - plain).abs().max())
        if not difference <= 16 * torch.finfo(model.dtype).eps * float(plain.abs().max()):
            raise ValueError(
                f"its logits change by {difference:.3g}, so its layers write by other ways than these"
            )
    except Exception as error:  # a model that checks its number of layers raises what it likes
        del stack[before:]
        _say(config, before, kinds)
        raise InputError(
            f"--pad-layers: {type(model).__name__} cannot be padded "
            f"({', '.join(written) or 'nothing'} of its layers silenced): {first_line(error)}"
        ) from error
    target.layers = before + layers
    return difference


def stack_of(target: Target) -> nn.ModuleList:
    """The decoder's list of layers."""
    stacks = (module for module in target.decoder.modules() if isinstance(module, nn.ModuleList))
    return next(stack for stack in stacks if len(stack) == target.layers)


@contextmanager
def recorded(layer: nn.Module) -> Iterator[list[str]]:
    """Inside, the names of the layer's linear modules are put into the list as they run."""
    calls: list[str] = []

    def keep(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, inputs: calls.append(name)

    linear = {name: module for name, module in layer.named_modules() if isinstance(module, LINEAR)}
    handles = [module.register_forward_pre_hook(keep(name)) for name, module in linear.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def outputs(calls: list[str]) -> list[str]:
    """Of each part of a layer the linear module that ran last; those of no part (OPT's MLP) are one together."""
    return list({name.rpartition(".")[0].partition(".")[0]: name for name in calls}.values())


def _silent(layer: nn.Module, written: list[str], number: int) -> nn.Module:
    """A copy of a layer, as number so-and-so, with projections of zero."""
    packed = [module.packed for module in layer.modules() if isinstance(module, PackedLinear)]
    silent = copy.deepcopy(
        layer, {id(weight): weight.clone() for weight in packed}
    )  # deepcopy takes none of these
    for module in silent.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.layer_idx = number  # type: ignore[assignment]
    for name in written:
        linear = silent.get_submodule(name)
        if isinstance(linear, PackedLinear):
            bias = linear.bias is not None
            linear = nn.Linear(linear.in_features, linear.out_features, bias, dtype=torch.bfloat16)
            silent.set_submodule(name, PackedLinear(_zero(linear)))
        else:
            _zero(linear)
    return silent


def _zero(linear: Module) -> Module:
    """With a weight and bias of zero."""
    for parameter in linear.parameters():
        parameter.zero_()
    return linear


def _say(config: Any, layers: int, kinds: list[str]) -> None:
    """Put the number of layers and their types into a config."""
    config.num_hidden_layers = layers
    if kinds:
        config.layer_types = kinds


def _logits(model: PreTrainedModel) -> Tensor:
    """[8, V] logits of a few tokens, float32."""
    tokens = (
        torch.arange(3, 11, device=model.device)[None] % model.config.get_text_config().vocab_size
    )
    return model(input_ids=tokens, use_cache=False).logits[0].float()
