"""The modules of a model that carry a state from token to token, and where their code keeps it.

transformers' models keep it in one of three places: in the cache (`InCache`: Mamba, gated delta
nets, short convolutions), in attributes of the module (`InModule`: RecurrentGemma), or in an
argument that goes from block to block (`InArgument`: RWKV).
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from treespec.errors import InputError
from treespec.model.cache import TreeCache
from treespec.model.recurrent_layer import State as State
from treespec.model.recurrent_layer import StateLayer

Arguments = dict[str, Any]
TRIAL = 6  # tokens


class Store(Protocol):
    """Where a mixer's code keeps its state, as a list of tensors [rows, ...] or None."""

    def fresh(self, arguments: Arguments) -> list[State]:
        """The state before the first token."""

    def blank(self, number: int, like: Tensor) -> Tensor:
        """State `number` before the first token, as a tensor."""

    def lend(self, cache: TreeCache, arguments: Arguments, states: Sequence[State]) -> None:
        """Put states where the mixer's code finds them. They may change there."""

    def take_back(self, cache: TreeCache, arguments: Arguments) -> list[State]:
        """The states that the code left."""


@final
@dataclass(frozen=True)
class InCache:
    """A conv state and a recurrent state for each of `numbers`, in a layer of the cache."""

    layer: int
    numbers: tuple[int, ...]

    def fresh(self, arguments: Arguments) -> list[State]:
        return [None, None] * len(self.numbers)

    def blank(self, number: int, like: Tensor) -> Tensor:
        return torch.zeros_like(like)

    def lend(self, cache: TreeCache, arguments: Arguments, states: Sequence[State]) -> None:
        self._of(cache).lend(self.numbers, states)

    def take_back(self, cache: TreeCache, arguments: Arguments) -> list[State]:
        return self._of(cache).take_back(self.numbers)

    def _of(self, cache: TreeCache) -> StateLayer:
        layer = cache.tree_layers[self.layer]
        assert isinstance(layer, StateLayer)
        return layer


@final
@dataclass(frozen=True)
class InModule:
    """Attributes of the module and of modules within it. None is no state."""

    attributes: tuple[tuple[nn.Module, str], ...]

    def fresh(self, arguments: Arguments) -> list[State]:
        return [None] * len(self.attributes)

    def blank(self, number: int, like: Tensor) -> Tensor:
        return torch.zeros_like(like)

    def lend(self, cache: TreeCache, arguments: Arguments, states: Sequence[State]) -> None:
        for (module, name), state in zip(self.attributes, states, strict=True):
            setattr(module, name, state)

    def take_back(self, cache: TreeCache, arguments: Arguments) -> list[State]:
        states: list[State] = [getattr(module, name) for module, name in self.attributes]
        self.lend(cache, arguments, [None] * len(states))
        return states


@final
@dataclass(frozen=True)
class InArgument:
    """The argument `state`: tensors [rows, H, layers], of which the module has one layer each."""

    layer: int
    layers: int

    def fresh(self, arguments: Arguments) -> list[State]:
        return [state[:, :, self.layer] for state in arguments["state"]]

    def blank(self, number: int, like: Tensor) -> Tensor:
        # RWKV's last state is the largest exponent so far.
        return torch.full_like(like, -1e30 if number == 4 else 0.0)

    def lend(self, cache: TreeCache, arguments: Arguments, states: Sequence[State]) -> None:
        lent = [state for state in states if state is not None]
        arguments["state"] = [state[:, :, None].expand(-1, -1, self.layers) for state in lent]

    def take_back(self, cache: TreeCache, arguments: Arguments) -> list[State]:
        return [state[:, :, self.layer] for state in arguments["state"]]


@final
@dataclass(frozen=True)
class Mixer:
    """continues: whether its code takes several tokens behind an earlier state.

    batches: whether it takes one token of several rows.
    chunks: whether it takes the argument `chunk_size`. It pads rows to whole chunks, and those of a
    tree are short.
    Mamba's and RecurrentGemma's read an earlier state in forwards of one token only; RWKV's mixes
    up the rows of such a forward.
    """

    module: nn.Module
    store: Store
    continues: bool = True
    batches: bool = True
    chunks: bool = False


Calls = dict[nn.Module, Arguments]


def find_stores(
    decoder: nn.Module, tokens: Tensor, cache: TreeCache
) -> tuple[dict[nn.Module, Store], Calls]:
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

    # 2. Where does each keep its state?
    stores: dict[nn.Module, Store] = {}
    for module, places in touched.items():
        layers = {layer for layer, _ in places}
        if len(layers) > 1:
            raise InputError(f"{type(module).__name__} carries the states of several layers")
        stores[module] = InCache(layers.pop(), tuple(sorted({number for _, number in places})))
    stores |= in_modules(decoder) | in_arguments(decoder)
    return {module: store for module, store in stores.items() if module in calls}, calls


def in_modules(decoder: nn.Module) -> dict[nn.Module, Store]:
    """Modules with attributes that hold a state: the outermost ones, with all attributes within."""
    stores: dict[nn.Module, Store] = {}
    inside: set[nn.Module] = set()
    for module in decoder.modules():
        if module in inside or not _state_names(module):
            continue
        parts = list(module.modules())
        inside.update(parts)
        stores[module] = InModule(
            tuple((part, name) for part in parts for name in _state_names(part))
        )
    return stores


def _state_names(module: nn.Module) -> list[str]:
    """Attributes, no weights or buffers, that are named as states and hold a tensor or nothing."""
    names = [name for name in vars(module) if name.endswith(("_state", "_states"))]
    return [name for name in names if isinstance(vars(module)[name], Tensor | None)]


def in_arguments(decoder: nn.Module) -> dict[nn.Module, Store]:
    """Innermost modules with an argument `state`, in a decoder that has one itself."""
    if "state" not in parameters_of(decoder):
        return {}
    takers = [module for module in decoder.modules() if "state" in parameters_of(module)]
    layers = len({vars(module)["layer_id"] for module in takers if "layer_id" in vars(module)})
    stores: dict[nn.Module, Store] = {}
    for module in takers:
        if not any(part in takers for part in list(module.modules())[1:]):
            stores[module] = InArgument(vars(module)["layer_id"], layers)
    return stores


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
