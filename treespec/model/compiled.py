"""Forwards that torch.compile has made for few shapes, as CUDA graphs want them; `regions` is what a CPU runs.

Nodes come by the bucket, and attention goes over all columns that a cache has:

three nodes in a bucket of four, over a cache of eight columns of which three are committed:

column    0 1 2 3 4 5 6 7
holds     c c c 0 1 2 . _       the fourth node `.` is nothing: it is written, and seen by itself alone
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin

from treespec.cache import TreeLayer

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
SHAPES = 256  # graphs of one function at most
CONTIGUOUS = torch.contiguous_format  # graphs are for strides, too


@final
class FixedLayer(CacheLayerMixin):
    """Storage of a `TreeLayer`, of which so many columns are used, written at those of a tensor [N] int64.

    Nothing is allocated here.
    """

    is_sliding = False
    is_compileable = True

    def __init__(self, keys: Tensor, values: Tensor, places: Tensor, columns: int) -> None:
        super().__init__()
        self.keys, self.values, self.places, self.columns = keys, values, places, columns
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is room already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [B, heads, N, D]; returns all, [B, heads, columns, D]."""
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self.places, key_states)
        self.values.index_copy_(2, self.places, value_states)
        return self.keys[:, :, : self.columns], self.values[:, :, : self.columns]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class Room(NamedTuple):
    """What a forward is filled up to: nodes, and columns of the cache."""

    nodes: int
    columns: int


@final
class Compiled:
    """A forward over layers of a cache, compiled by the bucket and on a GPU replayed as a CUDA graph.

    forward: (layers, tensors and constants) -> tensors [B, N, …]. backend: torch.compile's.
    """

    def __init__(
        self, forward: Callable[..., Any], device: torch.device, backend: str | Callable[..., Any] = "inductor"
    ) -> None:
        self.backend, self.graphs = backend, device.type == "cuda" and backend == "inductor"
        self.others: dict[nn.Module, Compiled] = {}
        self.made: set[tuple[Any, ...]] = set()  # what graphs there are for
        # No module changes any more, so that none is looked at before a call.
        options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
        if self.graphs:
            options["triton.cudagraphs"] = True

        def over(keys: list[Tensor], values: list[Tensor], places: Tensor, columns: int, *given: Any) -> Any:
            layers = [FixedLayer(k, v, places, columns) for k, v in zip(keys, values, strict=True)]
            return forward(layers, *given)

        over.__code__ = over.__code__.replace()  # graphs belong to a code object, of which all models would share one
        self.run = torch.compile(over, backend=backend, dynamic=False, options=options)

    def likewise(self, module: nn.Module, forward: Callable[..., Any], device: torch.device) -> "Compiled":
        """`forward(module, …)` of another module, compiled as this one, and once."""
        if module not in self.others:
            self.others[module] = Compiled(partial(forward, module), device, self.backend)
        return self.others[module]

    def room(self, nodes: int, layers: Sequence[TreeLayer]) -> Room | None:
        """What so many nodes are filled up to, with room for it in the layers; None where a plain forward has to do.

        That is behind layers that hold nothing yet, and beyond the largest bucket.
        """
        if nodes > BUCKETS[-1] or not layers[0].length:
            return None
        nodes = next(size for size in BUCKETS if size >= nodes)
        columns = max(layer.capacity for layer in layers)  # alike, but where an interrupt stopped their growth
        for layer in layers:
            layer.reserve(max(columns, layer.length + nodes))
        return Room(nodes, layers[0].capacity)

    def __call__(self, layers: Sequence[TreeLayer], room: Room, *given: Any) -> Any:
        """So many nodes are written behind the layers' length."""
        keys, values = map(list, zip(*(layer.storage for layer in layers), strict=True))
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
            for states in (*keys, *values):
                torch._dynamo.mark_static_address(states)
        places = torch.arange(layers[0].length, layers[0].length + room.nodes, device=keys[0].device)
        given = tuple(x.clone(memory_format=CONTIGUOUS) if isinstance(x, Tensor) else x for x in given)
        call = partial(self.run, keys, values, places, room.columns, *given)
        graph = (room, keys[0].data_ptr(), len(given[0]), *(x for x in given if isinstance(x, tuple)))
        if graph in self.made:
            return call()
        with torch._dynamo.config.patch(recompile_limit=SHAPES, accumulated_recompile_limit=SHAPES):
            self.made.add(graph)
            return call()


def padded(x: Tensor, nodes: int) -> Tensor:
    """[B, N, …] -> [B, nodes, …] with zeros behind."""
    return x if x.shape[1] == nodes else pad(x, (0, 0) * (x.dim() - 2) + (0, nodes - x.shape[1]))


def padded_mask(seen: Tensor, room: Room) -> Tensor:
    """[B, N, P + N] bool, what each node sees, -> [B, nodes, columns]. The nodes behind see themselves alone."""
    b, n, width = seen.shape
    if (n, width) == room:
        return seen
    whole = seen.new_zeros(b, room.nodes, room.columns)
    whole[:, :n, :width] = seen
    behind = torch.arange(room.nodes - n, device=seen.device)
    whole[:, n + behind, width + behind] = True
    return whole
