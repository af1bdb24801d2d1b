"""A decoder's layers compiled on a CPU: one graph for all that are alike, in seconds whatever their number.

    embeddings, positions, masks     as they are
    layer 0 | layer 1 | layer 2 …    one graph, given each one's weights and storage
    final norm, output embedding     as they are

Sizes are symbols in it, and none of torch's guards is looked at before a call, which would cost what a graph saves.
So what a graph is made for is looked up here: how layers are built, what constants they are called with, and whether
there is one text or several.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from treespec.cache import TreeLayer
from treespec.model.compiled import BUCKETS, FixedLayer, Room
from treespec.model.packed import make_packed_compilable
from treespec.model.taps import tapped

Backend = str | Callable[..., Any]


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

    def __init__(self, decoder: nn.Module, layers: nn.ModuleList, backend: Backend) -> None:
        make_packed_compilable()
        self.decoder, self.layers, self.backend = decoder, layers, backend
        self.graphs: dict[Any, Callable[..., Any]] = {}
        self.others: dict[nn.Module, CompiledStep] = {}
        self.several: set[bool] = set()  # texts that graphs are there for
        for number, layer in enumerate(layers):
            layer.forward = partial(self._layer, number, layer, layer.forward, {})

    def likewise(self, module: nn.Module, forward: Callable[..., Any], device: torch.device) -> "CompiledStep":
        """`forward(module, …)` of a module with one layer, once."""
        if module not in self.others:
            self.others[module] = CompiledStep(module, forward, self.backend)
        return self.others[module]

    def room(self, nodes: int, layers: Sequence[TreeLayer]) -> Room | None:
        return room_behind(layers, nodes, self.several)

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
        cache = Cache(layers=list(fixed(layers, room)))
        out = tapped(self.decoder, self.layers, cache, tokens, positions, masks, taps)
        self.several.add(len(tokens) > 1)
        return out

    def _layer(
        self,
        number: int,
        layer: nn.Module,
        plain: Callable[..., Any],
        own: dict[bool, tuple[Any, Callable[..., Any]]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """In the place of `layer.forward`. own: by several texts, where a call has the cache, and the layer's graph."""
        several = len(args[0] if args else kwargs["hidden_states"]) > 1
        if several in own:
            spot, graph = own[several]
            cache = args[spot] if isinstance(spot, int) else kwargs.get(spot)
        else:
            named: Iterator[tuple[Any, Any]] = chain(enumerate(args), kwargs.items())
            spot, cache = next(((k, v) for k, v in named if isinstance(v, Cache)), (0, None))
        if cache is None or not isinstance(storage := cache.layers[number], FixedLayer):
            return plain(*args, **kwargs)
        args = tuple(None if k == spot else dense(v) for k, v in enumerate(args))
        kwargs = {k: None if k == spot else dense(v) for k, v in kwargs.items()}
        if several in own:
            return graph(layer, storage.keys, storage.values, storage.places, storage.columns, args, kwargs)
        kind = (form(layer), several, spot, *map(constant, args), constant(kwargs))
        if new := kind not in self.graphs:
            self.graphs[kind] = graph_of(partial(call_layer, spot), self.backend)
        own[several] = spot, self.graphs[kind]
        with making(storage) if new else nullcontext():
            return self.graphs[kind](layer, storage.keys, storage.values, storage.places, storage.columns, args, kwargs)


@final
class CompiledStep:
    """`forward(module, [layer of a cache], *tensors)` over [B, N] nodes, by a graph."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], backend: Backend) -> None:
        self.module, self.backend = module, backend
        self.forward = lambda module, storage, *given: forward(module, [storage], *given)
        self.graphs: dict[bool, Callable[..., Any]] = {}  # by several texts

    def room(self, nodes: int, layers: Sequence[TreeLayer]) -> Room | None:
        return room_behind(layers, nodes, self.graphs)

    def __call__(self, layers: Sequence[TreeLayer], room: Room, *given: Tensor) -> Any:
        (storage,), several = fixed(layers, room), len(given[0]) > 1
        if new := several not in self.graphs:
            self.graphs[several] = graph_of(self.forward, self.backend)
        with making(storage) if new else nullcontext():
            return self.graphs[several](
                self.module, storage.keys, storage.values, storage.places, storage.columns, *map(dense, given)
            )


def room_behind(layers: Sequence[TreeLayer], nodes: int, made: Container[bool]) -> Room | None:
    """What so many nodes are filled up to, with room for it in the layers; None where a plain forward has to do.

    made: whether graphs are there for several texts, and for one. A graph is made from two nodes or more: what is one
    when it is made, torch takes for one forever.
    """
    if nodes > BUCKETS[-1] or not layers[0].length:
        return None
    if nodes == 1 and (len(layers[0].storage[0]) > 1) not in made:
        nodes = 2
    for layer in layers:
        layer.reserve(layer.length + nodes)
    return Room(nodes, layers[0].length + nodes)


def fixed(layers: Sequence[TreeLayer], room: Room) -> list[FixedLayer]:
    """The layers' storage, to write the nodes of a room behind their length."""
    places = torch.arange(room.columns - room.nodes, room.columns)
    return [FixedLayer(*layer.storage, places, room.columns) for layer in layers]


def graph_of(forward: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    """(module, keys, values, places, columns, *given) -> `forward(module, layer of a cache, *given)`, not made yet."""

    def over(module: nn.Module, keys: Tensor, values: Tensor, places: Tensor, columns: int, *given: Any) -> Any:
        return forward(module, FixedLayer(keys, values, places, columns), *given)

    over.__code__ = over.__code__.replace()  # graphs belong to a code object
    options: dict[str, Any] = {"guard_filter_fn": lambda guards: [False] * len(guards)}
    if backend == "inductor":
        options["size_asserts"] = False
    return torch.compile(over, backend=backend, fullgraph=True, dynamic=True, options=options)


def call_layer(
    spot: int | str, layer: nn.Module, storage: FixedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A layer's own forward, with its cache where it stands among the arguments."""
    cache = OneLayer(storage)
    if isinstance(spot, int):
        return type(layer).forward(layer, *args[:spot], cache, *args[spot + 1 :], **kwargs)
    return type(layer).forward(layer, *args, **{**kwargs, spot: cache})


@contextmanager
def making(storage: FixedLayer) -> Iterator[None]:
    """Inside, a graph is made for heads of the size that they have.

    What a processor says of itself is believed: torch would compile six programs to see.
    """
    for states in (storage.keys, storage.values):
        torch._dynamo.mark_static(states, [1, 3])
    with (
        torch._dynamo.config.patch(specialize_float=True),
        torch._inductor.config.patch({"cpp.vec_isa_ok": True}),
        torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
    ):
        yield


def dense(value: Any) -> Any:
    """A graph is for strides, too: tensors come as rows behind one another, those of a tuple as well."""
    if isinstance(value, Tensor):
        return value.contiguous()
    return tuple(map(dense, value)) if type(value) is tuple else value


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
