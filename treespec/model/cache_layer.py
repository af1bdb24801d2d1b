"""The keys and values of one attention layer: [B, KV heads, capacity, D], a KV head's columns together."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin

from treespec.kernels import ops as kernels
from treespec.trees.tree import to_device

BITS_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
MAX_SPARE_FACTOR = 4  # a block with more than this many times the rows in use is replaced
FEW_ROWS = 5  # a block of so few is kept


class ColumnMove(NamedTuple):
    """An accepted node that `commit` copies: its batch row, the column `source`, and its new column `place`."""

    row: int
    source: int
    place: int


def flatten_moves(moves: Sequence[ColumnMove], heads: int, capacity: int) -> Tensor:
    """Return [2, heads * moves] int64: the indices that the moves read and write in flattened storage.

    Storage [B, KV heads, capacity, D], flattened to [B * KV heads * capacity, D], has column c of head h of row b at
    (b * heads + h) * capacity + c. With 2 heads of 8 columns, row 1's move from column 6 to column 4:

        head          0     1
        reads        22    30      (1 * 2 + 0) * 8 + 6 = 22
        writes       20    28
    """
    row, source, place = torch.tensor(moves, dtype=torch.int64, device="cpu").T
    head = row * heads + torch.arange(heads, device="cpu")[:, None]  # [heads, moves]
    index = head * capacity + torch.stack([source, place])[:, None]
    return index.flatten(1)


def move_columns(layers: Sequence["TreeLayer"], moves: Sequence[ColumnMove]) -> None:
    """Copy columns of layers of one window.

    On a CPU one call of the kernels copies those of all layers of one shape. Elsewhere such layers share one index.

    moves: with ascending places in each row; no source is before its place, so no move overwrites a later source.
    """
    groups = defaultdict[Any, list[Tensor]](list)
    for layer in layers:
        for states in layer.storage:
            groups[states.shape, states.dtype, states.device].append(states)
    for blocks in groups.values():
        if blocks[0].is_cpu and kernels.load_kernels():
            kernels.copy_columns(blocks, moves)
            continue
        _, heads, capacity, _ = blocks[0].shape
        index = to_device(flatten_moves(moves, heads, capacity), blocks[0].device)
        sources, places = index
        for states in blocks:
            entries = states.flatten(0, 2)
            entries.index_copy_(0, places, entries.index_select(0, sources))


def read_bits_on_host(states: Tensor) -> np.ndarray:
    """Return the memory of a CPU tensor as a numpy array of integers: numpy has no bfloat16."""
    return states.view(BITS_DTYPES[states.element_size()]).numpy()


def allocate_block(like: Sequence[Tensor], rows: int, capacity: int) -> tuple[Tensor, ...]:
    """Allocate zeros [rows, KV heads, capacity, D] for each tensor [B, KV heads, N, D]."""
    return tuple(x.new_zeros(rows, x.shape[1], capacity, x.shape[3]) for x in like)


class TreeLayer(CacheLayerMixin):
    """Preallocated storage of one attention layer. The next forward writes at column `length`.

    Attributes:
        allocation: keys and values, [rows, KV heads, capacity, D] each; its further rows are for sequences that join.
        storage: its first B rows; () before the first forward.
        window: positions that a node sees, None for all.
        max_columns: columns at which growing stops, if they are enough.
        first: the first column that a forward attends to; no node sees an earlier one.
        columns: write indices while a CUDA graph is recorded; a forward then attends to all columns.
    """

    is_sliding = False
    is_croppable = True
    window: int | None = None
    max_columns: int | None = None
    first = 0
    columns: Tensor | None = None

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0
        self.storage: tuple[Tensor, ...] = ()
        self.allocation: tuple[Tensor, ...] = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate storage for keys and values like these, [B, KV heads, N, D]."""
        like = (key_states, value_states)
        self.allocation = allocate_block(like, len(key_states), self.capacity)
        self.storage = self.allocation

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
        """Let the next forward write after the `count` columns of the last one."""
        if self.columns is None:
            self.length += count
        else:
            self.columns = self.columns[count:]

    def reserve(self, columns: int) -> None:
        """Double the capacity until `columns` columns fit; the storage is copied once."""
        capacity = self.capacity
        while capacity < columns:
            capacity *= 2
        if self.max_columns:
            capacity = min(capacity, max(columns, self.max_columns))
        if capacity > self.capacity:
            rows = 0
            if self.storage:
                rows = len(self.storage[0])
            self.gather([(self, range(rows))], capacity)

    def limit_columns(self, columns: int) -> int:
        """Return `columns`, but at most `max_columns`."""
        if self.max_columns:
            return min(columns, self.max_columns)
        return columns

    def gather(self, parts: Sequence[tuple["TreeLayer", Sequence[int]]], capacity: int) -> None:
        """Replace the storage by rows of layers, in this order. An interrupt leaves the layer as it was.

        parts: (layer, its batch rows). Rows of a layer without storage are zeros. Rows of this layer that
        keep their index are not copied, if the capacity stays and the allocation has room for all rows.
        """
        total = sum(len(rows) for _, rows in parts)
        stays = self._has_room(total, capacity) and parts[0][0] is self
        block = self.allocation
        if not stays:
            like = next((layer.storage for layer, _ in parts if layer.storage), ())
            block = allocate_block(like, total + total // 4, capacity)
        first = 0
        for layer, rows in parts:
            layer._copy_rows(rows, block, first, in_place=stays)
            first += len(rows)
            stays = False
        # One statement without a call, which CPython does not interrupt.
        storage = tuple(states[:total] for states in block)
        self.allocation, self.storage, self.capacity = block, storage, capacity

    def _has_room(self, rows: int, capacity: int) -> bool:
        """Whether the allocation can hold these rows at this capacity, and is not far too large for them."""
        if not self.allocation or capacity != self.capacity:
            return False
        return rows <= len(self.allocation[0]) <= max(MAX_SPARE_FACTOR * rows, FEW_ROWS)

    def _copy_rows(
        self, rows: Sequence[int], block: tuple[Tensor, ...], first: int, in_place: bool
    ) -> None:
        """Copy batch rows of this layer into a block.

        Args:
            rows: of this layer.
            block: keys and values to write to.
            first: the block's first row to write.
            in_place: whether the block is this layer's allocation: then a row that keeps its index is not copied.
        """
        sources = []
        places = []
        for place, source in enumerate(rows, first):
            if source != place or not in_place:
                sources.append(source)
                places.append(place)
        if not self.storage or not sources:
            return
        end = min(self.length, block[0].shape[2])
        if len(sources) == 1:
            for states, old in zip(block, self.storage, strict=True):
                states[places[0], :, :end] = old[sources[0], :, :end]
            return
        source_rows = to_device(sources, block[0].device)
        place_rows = to_device(places, block[0].device)
        for states, old in zip(block, self.storage, strict=True):
            states[place_rows, :, :end] = old[:, :, :end].index_select(0, source_rows)

    def put(self, row: int, other: "TreeLayer") -> None:
        """Replace a batch row by the only row of another layer."""
        self.reserve(other.length)
        for states, new in zip(self.storage, other.storage, strict=False):
            states[row, :, : other.length] = new[0, :, : other.length]

    def update_indexer(self, keys: Tensor) -> Tensor:
        """Return [B, length + N, D] the keys [B, N, D] by which indexed attention chooses columns.

        Earlier keys are zeros: within the context length the index chooses all columns.
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
        """Ignore the model's positions."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1
