"""The keys and values of one attention layer: [B, KV heads, capacity, D], a KV head's columns together."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin

from treespec.trees.tree import sent

SPARE = 4  # times the rows of a block over those in use, before it is given up


class TreeLayer(CacheLayerMixin):
    """Preallocated storage of one attention layer. The next forward writes at column `length`.

    storage: keys and values, [B, KV heads, capacity, D] each; () before the first forward. block: what
    it is the first rows of; the others are for sequences that join.
    window: positions that a node sees, None for all. most: columns that growing stops at, if they
    are enough. first: the first column that a forward gets; no node sees an earlier one. columns:
    where the next forwards write instead, and get all columns (`cuda_graphs`).
    """

    is_sliding = False
    is_croppable = True
    window: int | None = None
    most: int | None = None
    first = 0
    columns: Tensor | None = None

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0
        self.storage: tuple[Tensor, ...] = ()
        self.block: tuple[Tensor, ...] = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate storage for keys and values like these, [B, KV heads, N, D]."""
        states = key_states, value_states
        shapes = [(*x.shape[:2], self.capacity, x.shape[3]) for x in states]
        self.block = tuple(x.new_zeros(shape) for x, shape in zip(states, shapes, strict=True))
        self.storage = self.block

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, KV heads, N, D] at `length`, as transformers' models ask for.

        Returns those from column `first` on, [B, KV heads, length + N - first, D].
        """
        if self.columns is not None:
            for states, new in zip(self.storage, (key_states, value_states), strict=True):
                states.index_copy_(2, self.columns[: new.shape[2]], new)
            return self.storage[0], self.storage[1]
        end = self.length + key_states.shape[-2]
        self.reserve(end)
        if not self.storage:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.storage
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        return keys[:, :, self.first : end], values[:, :, self.first : end]

    def advance(self, count: int) -> None:
        """The next forward writes behind the last one's `count` columns."""
        if self.columns is None:
            self.length += count
        else:
            self.columns = self.columns[count:]

    def reserve(self, columns: int) -> None:
        """Double the capacity until `columns` columns fit; the storage is copied once."""
        capacity = self.capacity
        while capacity < columns:
            capacity *= 2
        if self.most:
            capacity = min(capacity, max(columns, self.most))
        if capacity > self.capacity:
            self.gather([(self, range(len(self.storage[0]) if self.storage else 0))], capacity)

    def gather(self, parts: Sequence[tuple["TreeLayer", Sequence[int]]], capacity: int) -> None:
        """Become rows of layers, in this order. Another capacity comes at the end: an interrupt leaves the layer.

        parts: (layer, its batch rows). Rows of a layer without storage are zeros. Rows of this layer that
        keep their places are not copied, where the capacity stays and the block has room for all.
        """
        like = next((layer.storage for layer, _ in parts if layer.storage), ())
        total, first, block = sum(len(rows) for _, rows in parts), 0, self.block
        stays = bool(block) and parts[0][0] is self and capacity == self.capacity
        if not stays or not total <= len(block[0]) <= SPARE * total:
            stays, room = False, total + total // 4
            block = tuple(x.new_zeros(room, x.shape[1], capacity, x.shape[3]) for x in like)
        for layer, rows in parts:
            moved = [(row, i) for i, row in enumerate(rows, first) if row != i or not stays]
            if layer.storage and moved:
                end = min(layer.length, capacity)
                sources, places = (sent(list(x), like[0].device) for x in zip(*moved, strict=True))
                for states, old in zip(block, layer.storage, strict=True):
                    states[places, :, :end] = old[:, :, :end].index_select(0, sources)
            first, stays = first + len(rows), False
        # One statement without a call, which CPython does not interrupt.
        storage = tuple(states[:total] for states in block)
        self.block, self.storage, self.capacity = block, storage, capacity

    def put(self, row: int, other: "TreeLayer") -> None:
        """Replace a batch row by the only row of another layer."""
        self.reserve(other.length)
        for states, new in zip(self.storage, other.storage, strict=False):
            states[row, :, : other.length] = new[0, :, : other.length]

    def update_indexer(self, keys: Tensor) -> Tensor:
        """[B, length + N, D] the keys [B, N, D] by which indexed attention chooses columns.

        Zeros stand for earlier ones: within the context length it chooses all columns.
        """
        return pad(keys, (0, 0, self.length, 0))

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """[3, B, length] zeros, the positions of earlier columns, which only the index reads."""
        if not self.length:
            return None
        keys = self.storage[0]
        return torch.zeros(3, len(keys), self.length, dtype=torch.int64, device=keys.device)

    @indexer_position_ids.setter
    def indexer_position_ids(self, _: Tensor) -> None:
        """The model's own positions are not kept."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1
