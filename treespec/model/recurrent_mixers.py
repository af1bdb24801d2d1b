"""The modules of a model that carry a state from token to token: Mamba, delta nets, short convolutions.

Their code keeps it in a layer of the cache. Models that keep it elsewhere are refused (`inspect`).
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

from treespec.errors import InputError
from treespec.model.cache import TreeCache, TreeLayer

State = Tensor | None
Arguments = dict[str, Any]
TRIAL = 6  # tokens


@final
class StateLayer(TreeLayer, LinearAttentionLayer):
    """Keys and values of a `TreeLayer`, if the model's layer has any, and states of one call.

    The states of the texts lie in `treespec.model.recurrent_states.States`; here they are only
    while the model's own code reads and writes them.
    """

    device: Any  # of both bases
    dtype: Any

    def __init__(self, capacity: int, number_of_states: int) -> None:
        TreeLayer.__init__(self, capacity)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """transformers gives keys and values by place, states by name."""
        if args:
            TreeLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def lend(self, numbers: Sequence[int], states: Sequence[State]) -> None:
        """Hold these states. states: a conv state and a recurrent state for each of `numbers`."""
        for i, number in enumerate(numbers):
            conv, recurrent = states[2 * i : 2 * i + 2]
            self.conv_states[number], self.recurrent_states[number] = conv, recurrent
            self.is_conv_states_initialized[number] = conv is not None
            self.is_recurrent_states_initialized[number] = recurrent is not None
            self.has_previous_state[number] = conv is not None or recurrent is not None
            if conv is not None:
                self.conv_kernel_size[number] = conv.shape[-1]

    def take_back(self, numbers: Sequence[int]) -> list[State]:
        """The states that the model left, which go."""
        states: list[State] = []
        for number in numbers:
            states += [self.conv_states[number], self.recurrent_states[number]]
        self.lend(numbers, [None] * len(states))
        return states


@final
@dataclass(frozen=True)
class Mixer:
    """A module that carries a state: a conv state and a recurrent state for each of `numbers`.

    layer: of the cache, where its code finds them.
    continues: whether its code takes several tokens behind an earlier state. Mamba's reads one in
    forwards of one token only.
    chunks: whether it takes the argument `chunk_size`. It pads rows to whole chunks, and those of a
    tree are short.
    """

    module: nn.Module
    layer: int
    numbers: tuple[int, ...]
    continues: bool = True
    chunks: bool = False

    def fresh(self) -> list[State]:
        """The state before the first token."""
        return [None, None] * len(self.numbers)

    def state_layer(self, cache: TreeCache) -> StateLayer:
        layer = cache.tree_layers[self.layer]
        assert isinstance(layer, StateLayer)
        return layer


Calls = dict[nn.Module, Arguments]


def find_mixers(decoder: nn.Module, tokens: Tensor, cache: TreeCache) -> tuple[list[Mixer], Calls]:
    """The modules of a decoder that carry a state, and all modules' arguments in a trial forward.

    tokens: [1, T] int64, of the trial. cache: an empty one, which the trial fills.
    Raises InputError for a module that keeps states in several layers of the cache.
    """
    # 1. A forward: who is at work when the cache gives or takes a state?
    touched: dict[nn.Module, set[tuple[int, int]]] = {}
    takes, positions = parameters_of(decoder), torch.arange(tokens.shape[1])[None]
    with working(decoder) as (stack, calls), listening(cache, stack, touched):
        options: Arguments = {"past_key_values": cache, "cache_params": cache}
        options["position_ids"] = positions.to(tokens.device)
        taken = {name: value for name, value in options.items() if name in takes}
        decoder(input_ids=tokens, use_cache=True, **taken)

    # 2. In which layer does each keep its states?
    mixers: list[Mixer] = []
    for module, places in touched.items():
        layers = {layer for layer, _ in places}
        if len(layers) > 1:
            raise InputError(f"{type(module).__name__} carries the states of several layers")
        mixers.append(Mixer(module, layers.pop(), tuple(sorted({number for _, number in places}))))
    return mixers, calls


def parameters_of(module: nn.Module) -> dict[str, inspect.Parameter]:
    """The parameters of a module's forward, without self."""
    names = dict(inspect.signature(type(module).forward).parameters)
    names.pop("self", None)
    return names


def arguments_of(module: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    """A call's arguments by name."""
    names = list(parameters_of(module))
    return dict(zip(names, args, strict=False)) | kwargs


@contextmanager
def working(decoder: nn.Module) -> Iterator[tuple[list[nn.Module], Calls]]:
    """Inside, the stack holds the modules at work, and the dict the arguments of their last call."""
    stack: list[nn.Module] = []
    calls: Calls = {}

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> None:
        stack.append(module)
        calls[module] = arguments_of(module, args, kwargs)

    def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        stack.pop()

    handles = []
    for module in decoder.modules():
        handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
        handles.append(module.register_forward_hook(end, always_call=True))
    try:
        yield stack, calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def listening(
    cache: TreeCache, stack: list[nn.Module], touched: dict[nn.Module, set[tuple[int, int]]]
) -> Iterator[None]:
    """Inside, `touched` gets the layer and number of each state that a module reads or writes."""
    names = ("get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state")

    def heard(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            place = given["layer_idx"], given.get("state_idx", 0)
            touched.setdefault(stack[-1], set()).add(place)
            return original(*args, **kwargs)

        return call

    for name in names:
        setattr(cache, name, heard(getattr(cache, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(cache, name)
