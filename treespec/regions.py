"""A decoder's layers compiled on a CPU: one graph for all that are alike, in seconds whatever their number.

    embeddings, positions, masks     as they are
    layer 0 | layer 1 | layer 2 …    one graph, given each one's weights and storage
    final norm, output embedding     as they are

Sizes are symbols in it, and none of torch's guards is looked at before a call, which would cost what a graph saves.
So what a graph is made for is looked up here: how layers are built, what constants they are called with, and whether
there is one text or several.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from treespec.cache import TreeLayer
from treespec.compiled import BUCKETS, FixedLayer, Room
from treespec.packed import make_packed_compilable
from treespec.taps import tapped


@final
class OneLayer(Cache):
    """What a layer is given for the whole cache: its own storage, whatever its number."""

    def __init__(self, only: FixedLayer) -> None:
        super().__init__(layers=[only])
        self.only = only

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.only.update(key_states, value_states)


@final
class CompiledLayers:
    """The forward of a decoder whose layers are compiled. backend: torch.compile's.

    From now on the layers run a graph over a `FixedLayer`, and as before over all other caches.
    """

    def __init__(self, decoder: nn.Module, layers: nn.ModuleList, backend: str | Callable[..., Any]) -> None:
        make_packed_compilable()
        self.decoder, self.layers, self.backend = decoder, layers, backend
        self.graphs: dict[Any, Callable[..., Any]] = {}
        self.several: set[bool] = set()  # texts that graphs are there for
        for number, layer in enumerate(layers):
            layer.forward = partial(self._layer, number, layer, layer.forward, {})

    def room(self, nodes: int, layers: Sequence[TreeLayer]) -> Room | None:
        """What so many nodes are filled up to, with room for it in the layers; None where a plain forward has to do.

        A graph is made from two nodes or more: what is one when it is made, torch takes for one forever.
        """
        if nodes > BUCKETS[-1] or not layers[0].length:
            return None
        if nodes == 1 and (len(layers[0].storage[0]) > 1) not in self.several:
            nodes = 2
        for layer in layers:
            layer.reserve(layer.length + nodes)
        return Room(nodes, layers[0].length + nodes)

    def __call__(
        self,
        layers: Sequence[TreeLayer],
        room: Room,
        tokens: Tensor,
        positions: Tensor,
        masks: Any,
        taps: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """`tapped` over [B, N] nodes, which are written behind the layers' length."""
        places = torch.arange(room.columns - room.nodes, room.columns)
        cache = Cache(layers=[FixedLayer(*layer.storage, places, room.columns) for layer in layers])
        out = tapped(self.decoder, self.layers, cache, tokens, positions, masks, taps)
        self.several.add(len(tokens) > 1)
        return out

    def _layer(
        self,
        number: int,
        layer: nn.Module,
        plain: Callable[..., Any],
        own: dict[bool, tuple[int | str, Callable[..., Any]]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """In the place of `layer.forward`. own: by several texts, where a call has the cache, and the layer's graph."""
        several = len(args[0] if args else kwargs["hidden_states"]) > 1
        if several in own:
            spot, graph = own[several]
            cache = args[spot] if isinstance(spot, int) else kwargs[spot]
        else:
            named: Iterator[tuple[Any, Any]] = chain(enumerate(args), kwargs.items())
            spot, cache = next(((k, v) for k, v in named if isinstance(v, Cache)), (0, None))
        if cache is None or not isinstance(fixed := cache.layers[number], FixedLayer):
            return plain(*args, **kwargs)
        if isinstance(spot, int):
            args = (*args[:spot], None, *args[spot + 1 :])
        else:
            kwargs[spot] = None
        call = (layer, spot, fixed.keys, fixed.values, fixed.places, fixed.columns, args, kwargs)
        if several in own:
            return graph(*call)
        kind = (form(layer), several, spot, *map(constant, args), *((k, constant(v)) for k, v in kwargs.items()))
        new = kind not in self.graphs
        if new:
            self.graphs[kind] = compiled_layer(self.backend)
        own[several] = spot, self.graphs[kind]
        with making(fixed) if new else nullcontext():
            return self.graphs[kind](*call)


def compiled_layer(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """(layer, where its cache stands, keys, values, places, columns, arguments, named arguments) -> what it returns."""

    def over(
        layer: nn.Module,
        spot: int | str,
        keys: Tensor,
        values: Tensor,
        places: Tensor,
        columns: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        cache = OneLayer(FixedLayer(keys, values, places, columns))
        if isinstance(spot, int):
            return type(layer).forward(layer, *args[:spot], cache, *args[spot + 1 :], **kwargs)
        return type(layer).forward(layer, *args, **{**kwargs, spot: cache})

    over.__code__ = over.__code__.replace()  # graphs belong to a code object
    options: dict[str, Any] = {"guard_filter_fn": lambda guards: [False] * len(guards)}
    if backend == "inductor":
        options["size_asserts"] = False
    return torch.compile(over, backend=backend, fullgraph=True, dynamic=True, options=options)


@contextmanager
def making(fixed: FixedLayer) -> Iterator[None]:
    """Inside, a graph is made for heads of the size that they have."""
    for states in (fixed.keys, fixed.values):
        torch._dynamo.mark_static(states, [2, 3])
    with (
        torch._dynamo.config.patch(specialize_float=True),
        torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
    ):
        yield


def form(layer: nn.Module) -> tuple[Any, ...]:
    """What a graph of a layer is made from but its number: the kinds, constants and shapes in all its parts."""
    parts = []
    for name, module in layer.named_modules():
        constants = ((k, constant(v)) for k, v in vars(module).items() if k[0] != "_" and k != "layer_idx")
        weights = ((k, v.shape, v.dtype) for k, v in module.named_parameters(recurse=False))
        parts.append((name, type(module), *constants, *weights))
    return tuple(parts)


def constant(value: Any) -> Any:
    """A value that a graph is made for; of all others, their type."""
    if isinstance(value, Mapping):
        return tuple((k, constant(v)) for k, v in value.items())
    return value if isinstance(value, bool | int | float | str | None) else type(value)
