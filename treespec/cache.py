"""Keys and values of one text: written N nodes at a time, of which the accepted ones stay.

A layer's storage is [B, heads, capacity, head_dim]. `length` positions are committed; a forward writes its
nodes behind them, `commit` moves the accepted ones to the front of what was written and forgets the rest:

    committed      written by a forward over 5 nodes       commit([0, 2, 4])
    | a b c d |    | 0 1 2 3 4 |                      ->   | a b c d 0 2 4 |
"""

from typing import Any, final

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@final
class TreeLayer(CacheLayerMixin):
    """Preallocated storage of one attention layer. `length` positions are committed."""

    is_sliding = False
    is_croppable = True

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty(*key_states.shape[:2], self.capacity, key_states.shape[-1])
        self.values = value_states.new_empty(*value_states.shape[:2], self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [B, heads, N, D] behind what is committed; returns all, [B, heads, length + N, D]."""
        end = self.length + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if end > self.capacity:
            self.grow(end)
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def grow(self, needed: int) -> None:
        """Double the capacity until `needed` positions fit; the committed ones are copied once."""
        while self.capacity < needed:
            self.capacity *= 2
        old_keys, old_values = self.keys, self.values
        assert old_keys is not None
        assert old_values is not None
        self.lazy_initialization(old_keys, old_values)
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, : self.length] = old_keys[:, :, : self.length]
        self.values[:, :, : self.length] = old_values[:, :, : self.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


@final
class TreeCache(Cache):
    """The `Cache` that a transformers model is given: one `TreeLayer` a layer, all of one length."""

    def __init__(self, layers: int, capacity: int = 512) -> None:
        self.tree_layers = [TreeLayer(capacity) for _ in range(layers)]
        self.length = 0
        super().__init__(layers=list(self.tree_layers))

    @torch.no_grad()
    def commit(self, nodes: list[int]) -> None:
        """Keep nodes of the last forward, ascending numbers. Those that lead the rest stay where they are."""
        lead = next((i for i, node in enumerate(nodes) if node != i), len(nodes))
        if moved := nodes[lead:]:
            first, rows = self.length + lead, {}
            kept: list[Tensor] = []
            into: list[Tensor] = []
            for layer in self.tree_layers:
                if not layer.is_initialized:
                    continue
                if layer.device not in rows:
                    rows[layer.device] = torch.tensor(moved, device=layer.device) + self.length
                for states in (layer.keys, layer.values):
                    assert states is not None
                    kept.append(states.index_select(2, rows[layer.device]))
                    into.append(states.narrow(2, first, len(moved)))
            torch._foreach_copy_(into, kept)
        self.rewind(self.length + len(nodes))

    def rewind(self, length: int) -> None:
        """Only the first `length` positions stay committed. Growing this way is for `commit` alone."""
        self.length = length
        for layer in self.tree_layers:
            layer.length = length
