"""The cache of B sequences: a forward writes N nodes into each row, and each keeps accepted ones.

A layer's storage is [B, KV heads, capacity, head_dim], so that the columns of one KV head lie
together. A forward writes all rows at the same columns, after the longest sequence. `commit` moves a
sequence's accepted nodes to its end and forgets all others:

    committed      a forward over 5 nodes       commit([[0, 2], [0, 1, 4]])
    | a b c d      | a b c d 0 1 2 3 4          | a b c d 0 2
    | p q          | p q . . 0 1 2 3 4          | p q 0 1 4

Gaps are masked but stay finite: 0 · NaN is NaN.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin

from treespec.trees.tree import sent


class TreeLayer(CacheLayerMixin):
    """Preallocated storage of one attention layer. The next forward writes at column `length`.

    storage: keys and values, [B, KV heads, capacity, D] each; () before the first forward.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0
        self.storage: tuple[Tensor, ...] = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate storage for keys and values like these, [B, KV heads, N, D]."""
        states = key_states, value_states
        shapes = [(*x.shape[:2], self.capacity, x.shape[3]) for x in states]
        self.storage = tuple(x.new_zeros(shape) for x, shape in zip(states, shapes, strict=True))

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, KV heads, N, D] at `length`, as transformers' models ask for.

        Returns those of all columns, [B, KV heads, length + N, D].
        """
        end = self.length + key_states.shape[-2]
        self.reserve(end)
        if not self.storage:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.storage
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def reserve(self, columns: int) -> None:
        """Double the capacity until `columns` columns fit; the storage is copied once."""
        capacity = self.capacity
        while capacity < columns:
            capacity *= 2
        if capacity > self.capacity:
            self.gather([(self, range(len(self.storage[0]) if self.storage else 0))], capacity)

    def gather(self, parts: Sequence[tuple["TreeLayer", Sequence[int]]], capacity: int) -> None:
        """Become rows of layers, in this order, all at the end: an interrupt leaves the layer as it was.

        parts: (layer, its batch rows). Rows of a layer without storage are zeros.
        """
        like = next((layer.storage for layer, _ in parts if layer.storage), ())
        total, first = sum(len(rows) for _, rows in parts), 0
        storage = tuple(x.new_zeros(total, x.shape[1], capacity, x.shape[3]) for x in like)
        for layer, rows in parts:
            if layer.storage:
                index = sent(list(rows), like[0].device)
                end = min(layer.length, capacity)
                for states, old in zip(storage, layer.storage, strict=True):
                    copied = old[:, :, :end].index_select(0, index)
                    states[first : first + len(rows), :, :end] = copied
            first += len(rows)
        # One statement without a call, which CPython does not interrupt.
        self.storage, self.capacity = storage, capacity

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


State = dict[tuple[str, int], Tensor]  # [1, ...] each, by kind and number
States = list[State]  # of each recurrent layer; empty before the first token
Mark = tuple[int, States]  # a length of a sequence, and the states after it
MARKS = 2  # earlier states of a sequence that are kept


class Recurrent(Protocol):
    """The recurrent layers of a model (`recurrent`)."""

    def layers(self, capacity: int) -> list[TreeLayer]: ...
    def committed(self, cache: "TreeCache", nodes: Sequence[Sequence[int]]) -> list[States]: ...


@final
class TreeCache(Cache):
    """The `Cache` of a transformers model, with a `TreeLayer` for each layer.

    rows: of each sequence what `rewind` can go back to, and last its committed length and the states of
    recurrent layers after it. forwarded: kept from the last forward by each recurrent layer.

    `select`, `put` and `join` empty the rows while they move batch rows. So a cache without rows is
    one whose change was interrupted, and `Decoder` makes a new one. All other changes leave committed
    columns alone; after an interrupt, `rewind` makes the cache whole again.
    """

    def __init__(
        self, layers: int, capacity: int = 512, recurrent: Recurrent | None = None
    ) -> None:
        """recurrent: of the model, if any of its layers carry a state from token to token."""
        plain = [TreeLayer(capacity) for _ in range(layers)]
        self.tree_layers = recurrent.layers(capacity) if recurrent else plain
        self.recurrent = recurrent
        self.rows: list[list[Mark]] = [[(0, [])]]
        self.forwarded: dict[int, Any] = {}
        super().__init__(layers=list(self.tree_layers))

    @property
    def lengths(self) -> list[int]:
        """Committed positions of each sequence."""
        return [row[-1][0] for row in self.rows]

    @property
    def states(self) -> list[States]:
        """States of recurrent layers after each sequence's committed tokens."""
        return [row[-1][1] for row in self.rows]

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's recurrent states: before and after a forward, and to go back to."""
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
        """Keep each sequence's accepted nodes of the last forward, ascending, and forget all others."""
        # 1. List the columns to move: (batch row, from, to). Nodes already in place are not copied.
        end, moves = self.end, []
        for row, (length, kept) in enumerate(zip(self.lengths, nodes, strict=True)):
            columns = [(end + node, length + i) for i, node in enumerate(kept)]
            moves += [(row, source, place) for source, place in columns if source != place]

        # 2. Copy them in every layer. Layers of equal shape and device share one index.
        @functools.cache
        def flat(device: torch.device, heads: int, capacity: int) -> Tensor:
            row, source, place = torch.tensor(moves).T
            head = row * heads + torch.arange(heads)[:, None]  # [heads, moves]
            index = head * capacity + torch.stack([source, place])[:, None]
            return sent(index.flatten(1), device)

        for layer in self.tree_layers if moves else ():
            for states in layer.storage:
                sources, places = flat(states.device, *states.shape[1:3])
                entries = states.flatten(0, 2)
                entries.index_copy_(0, places, entries.index_select(0, sources))

        # 3. Bring the recurrent states to the accepted nodes, and set the new lengths.
        after = self.states
        if self.recurrent and any(nodes):
            after = self.recurrent.committed(self, nodes)
        ends = [length + len(kept) for length, kept in zip(self.lengths, nodes, strict=True)]
        now = zip(ends, after, strict=True)
        self._hold([[*row[:-1], mark] for row, mark in zip(self.rows, now, strict=True)])

    def rewind(self, lengths: Sequence[int]) -> None:
        """Truncate each sequence to `lengths`.

        A recurrent layer keeps its states after a few lengths only. A sequence with such layers is cut
        to the nearest of those lengths, at most the one asked for: read `self.lengths` afterwards.
        """
        rows: list[list[Mark]] = [[(length, [])] for length in lengths]
        for number, length in enumerate(lengths if self.recurrent else ()):
            rows[number] = self.rows[number]
            if length < self.lengths[number]:
                marks = [mark for mark in self.rows[number][:-1] if mark[0] <= length]
                rows[number] = [*marks, marks[-1] if marks else (0, [])]
        self._hold(rows)

    def mark(self) -> None:
        """Keep the recurrent states of the present lengths, for `rewind`."""
        for number, (*marks, now) in enumerate(self.rows):
            if all(now[0] != length for length, _ in marks):
                self.rows[number] = [*[*marks, now][-MARKS:], now]

    def _hold(self, rows: list[list[Mark]]) -> None:
        self.rows = rows
        self.write_at(self.end)

    def write_at(self, column: int) -> None:
        """Until the next commit or rewind, forwards write at `column` and behind it."""
        for layer in self.tree_layers:
            layer.length = column

    @contextmanager
    def writing_at(self, column: int) -> Iterator[None]:
        """Inside, forwards write at `column`, after uncommitted nodes of earlier forwards."""
        try:
            self.write_at(column)
            yield
        finally:
            self.write_at(self.end)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these sequences, in this order."""
        kept, self.rows = [self.rows[row] for row in rows], []
        for layer in self.tree_layers:
            layer.gather([(layer, rows)], layer.capacity)
        self._hold(kept)

    def put(self, row: int, other: "TreeCache") -> None:
        """Replace a row's sequence by the only one of another cache. No other row is copied."""
        rows, self.rows = [*self.rows[:row], other.rows[0], *self.rows[row + 1 :]], []
        for layer, new in zip(self.tree_layers, other.tree_layers, strict=True):
            layer.put(row, new)
        self._hold(rows)

    def join(self, others: Sequence["TreeCache"]) -> None:
        """Append the sequences of other caches of the same model."""
        all_rows, self.rows = [cache.rows for cache in (self, *others)], []
        for layers in zip(self.tree_layers, *(other.tree_layers for other in others), strict=True):
            parts = [(layer, range(len(one))) for layer, one in zip(layers, all_rows, strict=True)]
            layers[0].gather(parts, max(layer.capacity for layer in layers))
        self._hold([row for rows in all_rows for row in rows])

    def alone(self, row: int) -> "TreeCache":
        """A copy of one sequence, in a cache of its own."""
        copy = TreeCache(len(self.tree_layers), recurrent=self.recurrent)
        for own, layer in zip(copy.tree_layers, self.tree_layers, strict=True):
            if layer.storage:
                own.gather([(layer, [row])], max(1, self.lengths[row]))
        copy._hold([self.rows[row]])
        return copy
