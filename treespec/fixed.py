"""Forwards of few shapes, for torch.compile and CUDA graphs: nodes by the bucket, and all columns that a cache has.

three nodes in a bucket of four, over a cache of eight columns of which three are committed:

column    0 1 2 3 4 5 6 7
holds     c c c 0 1 2 . _       the fourth node `.` is nothing: it is written, and seen by itself alone
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin

from treespec.cache import TreeLayer

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
SHAPES = 256  # graphs of one function at most


@final
class FixedLayer(CacheLayerMixin):
    """Storage of a `TreeLayer` that is written at the columns [N] int64 of a tensor. Nothing is allocated here."""

    is_sliding = False
    is_compileable = True

    def __init__(self, keys: Tensor, values: Tensor, columns: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.columns = keys, values, columns
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is room already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [B, heads, N, D]; returns all, [B, heads, capacity, D]."""
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(1, self.columns, key_states.transpose(1, 2))
        self.values.index_copy_(1, self.columns, value_states.transpose(1, 2))
        return self.keys.transpose(1, 2), self.values.transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        assert self.keys is not None
        return self.keys.shape[1], 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


@final
class Fixed:
    """A forward over layers of a cache, compiled once for each shape; on a GPU it is replayed as a CUDA graph.

    forward: (layers, tensors and constants) -> tensors [B, N, …]. backend: torch.compile's.
    """

    def __init__(self, forward: Callable[..., Any], device: torch.device, backend: str = "inductor") -> None:
        self.backend = backend
        self.graphs = device.type == "cuda" and backend == "inductor"

        def over(keys: list[Tensor], values: list[Tensor], columns: Tensor, *given: Any) -> Any:
            return forward([FixedLayer(k, v, columns) for k, v in zip(keys, values, strict=True)], *given)

        self.run = torch.compile(over, dynamic=False, mode="reduce-overhead" if self.graphs else None, backend=backend)

    def __call__(self, layers: Sequence[TreeLayer], nodes: int, *given: Any) -> Any:
        """So many nodes are written behind the layers' length, for which there is room."""
        keys, values = map(list, zip(*(layer.storage for layer in layers), strict=True))
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
            for states in (*keys, *values):
                torch._dynamo.mark_static_address(states)
        columns = torch.arange(layers[0].length, layers[0].length + nodes, device=keys[0].device)
        with torch._dynamo.config.patch(recompile_limit=SHAPES, accumulated_recompile_limit=SHAPES):
            return self.run(keys, values, columns, *given)


def room(nodes: int, layers: Sequence[TreeLayer]) -> int:
    """The bucket for so many nodes, with room for it in the layers; 0 where a plain forward has to do.

    That is beyond the largest bucket, and in layers that hold nothing yet.
    """
    size = next((size for size in BUCKETS if size >= nodes), 0)
    if not size or not layers[0].is_initialized:
        return 0
    for layer in layers:
        layer.reserve(layer.length + size)
    return size


def padded(x: Tensor, nodes: int) -> Tensor:
    """[B, N, …] -> [B, nodes, …] with zeros behind."""
    return pad(x, (0, 0) * (x.dim() - 2) + (0, nodes - x.shape[1]))


def padded_mask(seen: Tensor, nodes: int, columns: int) -> Tensor:
    """[B, N, P + N] bool, what each node sees, -> [B, nodes, columns]. The nodes behind see themselves alone."""
    b, n, width = seen.shape
    whole = seen.new_zeros(b, nodes, columns)
    whole[:, :n, :width] = seen
    behind = torch.arange(nodes - n, device=seen.device)
    whole[:, n + behind, width + behind] = True
    return whole
