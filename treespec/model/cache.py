"""The cache of B texts: a forward writes N nodes into each row, and each text keeps accepted ones.

A layer's storage is [B, KV heads, capacity, head_dim], so that the columns of one KV head lie
together. A forward writes all rows at the same columns, behind the longest text. `commit` moves a
text's accepted nodes to the text's end and forgets all others:

    committed      a forward over 5 nodes       commit([[0, 2], [0, 1, 4]])
    | a b c d      | a b c d 0 1 2 3 4          | a b c d 0 2
    | p q          | p q . . 0 1 2 3 4          | p q 0 1 4

Gaps are masked but stay finite: 0 · NaN is NaN.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin


class TreeLayer(CacheLayerMixin):
    """Preallocated storage of one attention layer. The next forward writes at column `length`."""

    is_sliding = False
    is_croppable = True

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate storage for keys and values like these, [B, KV heads, N, D]."""
        b, heads = key_states.shape[:2]
        keys = key_states.new_zeros(b, heads, self.capacity, key_states.shape[3])
        values = value_states.new_zeros(b, heads, self.capacity, value_states.shape[3])
        self._hold(keys, values)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, KV heads, N, D] at `length`, as transformers' models ask for.

        Returns those of all columns, [B, KV heads, length + N, D].
        """
        end = self.length + key_states.shape[-2]
        self.reserve(end)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.storage
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    @property
    def storage(self) -> tuple[Tensor, Tensor]:
        """Keys and values, [B, KV heads, capacity, D] each."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def reserve(self, columns: int) -> None:
        """Double the capacity until `columns` columns fit; the storage is copied once."""
        capacity = self.capacity
        while capacity < columns:
            capacity *= 2
        if capacity > self.capacity:
            rows = range(len(self.storage[0])) if self.is_initialized else ()
            self.gather([(self, rows)], capacity)

    def gather(self, parts: Sequence[tuple["TreeLayer", Sequence[int]]], capacity: int) -> None:
        """Become rows of layers, in this order, all at the end: an interrupt leaves the layer as it was.

        parts: (layer, its batch rows). Rows of a layer without storage are zeros.
        """
        held = [layer.storage for layer, _ in parts if layer.is_initialized]
        if not held:
            self.capacity = capacity
            return
        total, first = sum(len(rows) for _, rows in parts), 0
        storage = [x.new_zeros(total, x.shape[1], capacity, x.shape[3]) for x in held[0]]
        for layer, rows in parts:
            if layer.is_initialized:
                index, end = torch.tensor(rows, device=layer.device), min(layer.length, capacity)
                for states, old in zip(storage, layer.storage, strict=True):
                    copied = old[:, :, :end].index_select(0, index)
                    states[first : first + len(rows), :, :end] = copied
            first += len(rows)
        self._hold(*storage)

    def put(self, row: int, other: "TreeLayer") -> None:
        """Replace a batch row by the only row of another layer."""
        if other.is_initialized:
            self.reserve(other.length)
            for states, new in zip(self.storage, other.storage, strict=True):
                states[row, :, : other.length] = new[0, :, : other.length]

    def _hold(self, keys: Tensor, values: Tensor) -> None:
        """Make these the storage, [B, KV heads, capacity, D] each."""
        self.dtype, self.device = keys.dtype, keys.device
        # One statement without a call, which CPython does not interrupt.
        parts = keys, values, keys.shape[2], True
        self.keys, self.values, self.capacity, self.is_initialized = parts

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


State = dict[tuple[str, int], Tensor]  # [1, ...] each, by kind and number
States = list[State]  # of each recurrent layer; empty before the first token
MARKS = 2  # earlier states of a text that are kept


class Recurrent(Protocol):
    """The recurrent layers of a model (`recurrent`)."""

    def layers(self, capacity: int) -> list[TreeLayer]: ...
    def committed(self, cache: "TreeCache", nodes: Sequence[Sequence[int]]) -> list[States]: ...


@final
class TreeCache(Cache):
    """The `Cache` of a transformers model, with a `TreeLayer` for each layer.

    lengths: committed positions of each text. states: of recurrent layers after each text's committed
    tokens; marks: earlier lengths and their states. forwarded: what the last forward left of each
    recurrent layer.

    `select`, `put` and `join` empty the lengths while they move batch rows. So a cache without
    lengths is one whose change was interrupted, and `Decoder` makes a new one. All other changes
    leave committed columns alone; after an interrupt, `rewind` makes the cache whole again.
    """

    def __init__(
        self, layers: int, capacity: int = 512, recurrent: Recurrent | None = None
    ) -> None:
        """recurrent: of the model, if any of its layers carry a state from token to token."""
        plain = [TreeLayer(capacity) for _ in range(layers)]
        self.tree_layers = recurrent.layers(capacity) if recurrent else plain
        self.recurrent = recurrent
        self.lengths = [0]
        self.states: list[States] = [[]]
        self.marks: list[list[tuple[int, States]]] = [[]]
        self.forwarded: dict[int, Any] = {}
        super().__init__(layers=list(self.tree_layers))

    @property
    def state_bytes(self) -> int:
        """Bytes of a text's recurrent states: before and after a forward, and to go back to."""
        return (2 + MARKS) * sum(x.nbytes for state in self.states[0] for x in state.values())

    @property
    def end(self) -> int:
        """The column that the next forward writes at."""
        return max(self.lengths, default=0)

    def reserve(self, columns: int) -> None:
        """Allocate columns in every layer, where the length is known beforehand."""
        for layer in self.tree_layers:
            layer.reserve(columns)

    @torch.no_grad()
    def commit(self, nodes: Sequence[Sequence[int]]) -> None:
        """Keep each text's accepted nodes of the last forward, ascending, and forget all others."""
        # 1. List the columns to move: (batch row, from, to). Nodes already in place are not copied.
        end, moves = self.end, []
        for row, (length, kept) in enumerate(zip(self.lengths, nodes, strict=True)):
            columns = [(end + node, length + i) for i, node in enumerate(kept)]
            moves += [(row, source, place) for source, place in columns if source != place]

        # 2. Copy them in every layer. Layers of equal shape and device share one index.
        if moves:
            row, source, place = torch.tensor(moves).T
            flat: dict[tuple[torch.device, int, int], Tensor] = {}
            for layer in self.tree_layers:
                if not layer.is_initialized:
                    continue
                for states in layer.storage:
                    kind = device, heads, capacity = states.device, *states.shape[1:3]
                    if kind not in flat:
                        head = row * heads + torch.arange(heads)[:, None]  # [heads, moves]
                        index = head * capacity + torch.stack([source, place])[:, None]
                        flat[kind] = index.flatten(1).to(device)
                    sources, places = flat[kind]
                    entries = states.flatten(0, 2)
                    entries.index_copy_(0, places, entries.index_select(0, sources))

        # 3. Bring the recurrent states to the accepted nodes, and set the new lengths.
        if self.recurrent and any(nodes):
            self.states = self.recurrent.committed(self, nodes)
        self._end_at([length + len(kept) for length, kept in zip(self.lengths, nodes, strict=True)])

    def rewind(self, lengths: Sequence[int]) -> None:
        """Truncate each text to `lengths`.

        A recurrent layer keeps its states after a few lengths only. A text with such layers is cut
        to the nearest of those lengths, at most the one asked for: read `self.lengths` afterwards.
        """
        reached = list(lengths)
        for row, length in enumerate(lengths if self.recurrent else ()):
            reached[row] = self.lengths[row]
            if length < reached[row]:
                marks = self.marks[row] = [mark for mark in self.marks[row] if mark[0] <= length]
                reached[row], self.states[row] = marks[-1] if marks else (0, [])
        self._end_at(reached)

    def mark(self) -> None:
        """Keep the recurrent states of the present lengths, for `rewind`."""
        for row, mark in enumerate(zip(self.lengths, self.states, strict=True)):
            if all(mark[0] != length for length, _ in self.marks[row]):
                self.marks[row] = [*self.marks[row], mark][-MARKS:]

    def _end_at(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        for layer in self.tree_layers:
            layer.length = self.end

    @contextmanager
    def writing_at(self, column: int) -> Iterator[None]:
        """Inside, forwards write at `column`, behind uncommitted nodes of earlier forwards."""
        before = [layer.length for layer in self.tree_layers]
        try:
            for layer in self.tree_layers:
                layer.length = column
            yield
        finally:
            for layer, length in zip(self.tree_layers, before, strict=True):
                layer.length = length

    def select(self, rows: Sequence[int]) -> None:
        """Keep these texts, in this order."""
        kept, self.lengths = [self.lengths[row] for row in rows], []
        for layer in self.tree_layers:
            if layer.is_initialized:
                layer.gather([(layer, rows)], layer.capacity)
        self.states = [self.states[row] for row in rows]
        self.marks = [self.marks[row] for row in rows]
        self._end_at(kept)

    def put(self, row: int, other: "TreeCache") -> None:
        """Replace a row's text by the only text of another cache. No other row is copied."""
        lengths, self.lengths = list(self.lengths), []
        for layer, new in zip(self.tree_layers, other.tree_layers, strict=True):
            layer.put(row, new)
        lengths[row], self.states[row], self.marks[row] = (
            other.lengths[0],
            other.states[0],
            other.marks[0],
        )
        self._end_at(lengths)

    def join(self, others: Sequence["TreeCache"]) -> None:
        """Append the texts of other caches of the same model."""
        caches = [self, *others]
        texts, self.lengths = [cache.lengths for cache in caches], []
        for layers in zip(*(cache.tree_layers for cache in caches), strict=True):
            rows = [(layer, range(len(one))) for layer, one in zip(layers, texts, strict=True)]
            layers[0].gather(rows, max(layer.capacity for layer in layers))
        self.states = [states for cache in caches for states in cache.states]
        self.marks = [marks for cache in caches for marks in cache.marks]
        self._end_at([length for lengths in texts for length in lengths])

    def alone(self, row: int) -> "TreeCache":
        """A copy of one text, in a cache of its own."""
        copy = TreeCache(len(self.tree_layers), recurrent=self.recurrent)
        for own, layer in zip(copy.tree_layers, self.tree_layers, strict=True):
            if layer.is_initialized:
                own.gather([(layer, [row])], max(1, self.lengths[row]))
        copy.states, copy.marks = [self.states[row]], [self.marks[row]]
        copy._end_at([self.lengths[row]])
        return copy
