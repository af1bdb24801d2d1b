"""`--compile`: torch.compile over a decoder's layers, with one graph for all layers that are alike.

    embeddings, rotary angles, masks     eager
    layer 0 | layer 1 | layer 2 …        one graph, called with each layer's weights and storage
    final norm, output embedding         eager

Sizes are symbols in a graph, except that torch specialises on one node and on one text. So alike layers have at most
four graphs, whatever their number, each made at its first call. A draft head of one layer is compiled whole.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from transformers.cache_utils import Cache

from treespec.cache import TreeCache, TreeLayer
from treespec.model.packed import make_packed_compilable

MOST_NODES = 128  # longer chunks, of prompts, run eagerly: multiplying takes most of their time
PLACE = "cache"  # stands for the cache among a graph's arguments

CACHES = TreeCache, TreeLayer

Backend = str | Callable[..., Any]
Graph = Callable[..., Any]


@final
class OneLayer(Cache):
    """The cache inside a graph: one layer's storage, so that the graph does not depend on the layer's number."""

    def __init__(self, keys: Tensor, values: Tensor, end: int) -> None:
        """keys, values: [B, heads, capacity, D]. end: the column behind the nodes, never 1 or 0."""
        super().__init__(layers=[])
        self.keys, self.values, self.end = keys, values, end

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [B, heads, N, D]; returns all, [B, heads, end, D]."""
        start = self.end - key_states.shape[2]
        self.keys[:, :, start : self.end] = key_states
        self.values[:, :, start : self.end] = value_states
        return self.keys[:, :, : self.end], self.values[:, :, : self.end]


@final
class CompiledForward:
    """Stands in for `module.forward`: runs a graph behind a tree's cache, and the eager forward in all other calls."""

    def __init__(self, module: nn.Module, number: int, graph: Graph) -> None:
        """number: the module's layer in a `TreeCache`."""
        self.module, self.number, self.graph, self.eager = module, number, graph, module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # 1. Find the layer of the cache, and the columns that this call writes.
        cache = kwargs.get("past_key_values")
        if cache is None:
            cache = next((x for x in args if isinstance(x, CACHES)), None)
        if not isinstance(cache, CACHES):
            return self.eager(*args, **kwargs)
        layer = cache.tree_layers[self.number] if isinstance(cache, TreeCache) else cache
        nodes = (args[0] if args else kwargs["hidden_states"]).shape[1]
        if not layer.length or nodes > MOST_NODES:
            return self.eager(*args, **kwargs)
        end = layer.length + nodes
        layer.reserve(end)  # not inside the graph, which holds no growth

        # 2. Run the graph, with its storage in the cache's place.
        given = [PLACE if x is cache else x for x in args]
        named = {name: PLACE if x is cache else x for name, x in kwargs.items()}
        try:
            return self.graph(self.module, *layer.storage, end, given, named)
        except FailOnRecompileLimitHit:  # torch keeps eight graphs of a kind
            return self.eager(*args, **kwargs)


def compile_layers(layers: Iterable[nn.Module], backend: Backend = "inductor") -> None:
    """From now on run graphs wherever these modules are called with a tree's cache. backend: torch.compile's."""
    make_packed_compilable()
    graphs: dict[object, Graph] = {}
    for number, layer in enumerate(layers):
        kind = form(layer)
        if kind not in graphs:
            graphs[kind] = graph_of(backend)
        layer.forward = CompiledForward(layer, number, graphs[kind])


def graph_of(backend: Backend) -> Graph:
    """(module, keys, values, end, args, kwargs) -> the module's forward with a `OneLayer` as its cache."""

    def over(
        module: nn.Module,
        keys: Tensor,
        values: Tensor,
        end: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        cache = OneLayer(keys, values, end)
        given = [cache if x is PLACE else x for x in args]
        return type(module).forward(module, *given, **{k: cache if x is PLACE else x for k, x in kwargs.items()})

    over.__code__ = over.__code__.replace()  # torch keeps graphs by code object, and each kind of layer has its own
    options: dict[str, Any] = {"guard_filter_fn": tensors_and_sizes}
    if backend == "inductor":
        options["size_asserts"] = False  # the guards have looked at the sizes
    return torch.compile(over, backend=backend, fullgraph=True, dynamic=True, options=options)


def tensors_and_sizes(guards: Sequence[Any]) -> list[bool]:
    """The guards to check before each call: on the tensors it brings, and on how their sizes go together.

    Guards on the module would cost what the graph saves. Nothing changes a module while it decodes, and `form` tells
    apart those with other constants.
    """
    tensors = torch.compiler.keep_tensor_guards_unsafe(guards)
    return [keep or guard.guard_type == "SHAPE_ENV" for keep, guard in zip(tensors, guards, strict=True)]


def form(module: nn.Module) -> tuple[object, ...]:
    """Equal for modules that may share a graph: all but `layer_idx` and the values of weights."""
    parts: list[object] = []
    for name, part in module.named_modules():
        values = ((k, v) for k, v in vars(part).items() if k[0] != "_" and k != "layer_idx")
        constants = [(k, v if isinstance(v, bool | int | float | str | None) else type(v)) for k, v in values]
        weights = [(k, v.shape, v.dtype) for k, v in part.named_parameters(recurse=False)]
        parts.append((name, type(part), *constants, *weights))
    return tuple(parts)
