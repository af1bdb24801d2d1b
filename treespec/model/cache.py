"""The cache of B sequences: a forward writes N nodes into each row, and `commit` keeps the accepted nodes.

A layer's storage is [B, KV heads, capacity, head_dim], so that the columns of one KV head lie
together. A forward writes all rows at the same columns, after the longest sequence. `commit` moves a
sequence's accepted nodes to its end and forgets all others:

    committed      a forward over 5 nodes       commit([[0, 2], [0, 1, 4]])
    | a b c d      | a b c d 0 1 2 3 4          | a b c d 0 2
    | p q          | p q . . 0 1 2 3 4          | p q 0 1 4

Gaps are masked but stay finite: 0 · NaN is NaN.

A layer with a window keeps only the latest columns of each sequence. `commit` drops older columns, a
few hundred at a time, and moves the remaining ones to the front. Five tokens under a window of 2, if
`rewind` may take back one token:

    a b c d e      after commit    d e
    p q                            p q

The first sequence can be cut to a b c d, as the next position sees d and itself, or to nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from treespec.model.cache_layer import ColumnMove, TreeLayer, move_columns
from treespec.model.cache_rows import (
    CacheRow,
    CacheSnapshot,
    States,
    find_first_seen,
    make_empty_row,
    replace_at,
)
from treespec.trees.tree import cache_tensor, to_device

MAX_SNAPSHOTS = 2  # earlier snapshots kept for each sequence
# Committed tokens that layers keep beyond their windows. They drop a third of them at a time.
WINDOW_SLACK_TOKENS = 1536
MAX_FORWARD_NODES = 512  # nodes of a forward that layers with a window have room for


class RecurrentStates(Protocol):
    """The recurrent layers of a model (`treespec.model.recurrent`)."""

    def build_layers(self, capacity: int) -> list[TreeLayer]: ...
    def compute_committed_states(
        self, cache: "TreeCache", nodes: Sequence[Sequence[int]]
    ) -> list[States]: ...


class LayersAhead(NamedTuple):
    """An output [B, N, H] that a call of a decoder layer computed for the following layers too.

    next_layer: the first layer that is not computed; those before it only pass the output on.
    """

    output: Tensor
    next_layer: int


@final
class TreeCache(Cache):
    """The `Cache` of a transformers model, with a `TreeLayer` for each layer.

    `select`, `put`, `join` and a `commit` that drops columns empty `rows` while they move batch
    rows. So empty `rows` mark a cache left inconsistent by an interrupt, and `Decoder` makes a new one.
    All other changes leave committed columns as they are; after an interrupt, `rewind` makes the cache
    consistent again.

    Attributes:
        rows: by sequence, its committed length with the states of recurrent layers, and earlier snapshots.
        forwarded: what each recurrent layer keeps from the last forward.
        tokens: [B, N] of the last forward, if the sequences' tokens are kept.
        node_counts: by sequence, its first nodes in the present forward; the others are padding, whose outputs
            nobody reads. None: not known.
        layer_windows: the windows that its layers have, None among them if a layer has none.
        smallest_window: 0 without windows.
        layers_ahead: what fused layers have computed ahead in the present forward; None: nothing.
    """

    def __init__(
        self,
        layers: int,
        capacity: int = 512,
        recurrent: RecurrentStates | None = None,
        windows: Sequence[int | None] = (),
        slack: int = WINDOW_SLACK_TOKENS,
    ) -> None:
        """Make a cache of one empty sequence.

        Args:
            layers: number of the model's layers.
            capacity: columns to allocate at the first forward; it grows by doubling.
            recurrent: the model's layers that carry a state from token to token, if it has any.
            windows: by layer, in positions; None: no window.
            slack: tokens that `rewind` can take back in layers with a window.
        """
        if recurrent:
            self.tree_layers = recurrent.build_layers(capacity)
        else:
            self.tree_layers = [TreeLayer(capacity) for _ in range(layers)]
        self.recurrent, self.windows, self.rewind_room = recurrent, windows, slack
        for layer, window in zip(self.tree_layers, windows, strict=False):
            if window:
                layer.window, layer.max_columns = window, window + slack + MAX_FORWARD_NODES
                layer.capacity = min(capacity, layer.max_columns)
        self.layer_windows = {layer.window for layer in self.tree_layers}
        self.smallest_window = min(filter(None, windows), default=0)
        self.rows = [make_empty_row()]
        self.forwarded: dict[int, Any] = {}
        self.tokens: Tensor | None = None
        self.node_counts: Sequence[int] | None = None
        self.layers_ahead: LayersAhead | None = None
        super().__init__(layers=list(self.tree_layers))

    @property
    def lengths(self) -> list[int]:
        """Number of committed positions, by sequence."""
        return [row.now.length for row in self.rows]

    def shift_positions(self, places: Tensor) -> Tensor:
        """Add each sequence's `shift` to the indices `places` [B, N] of nodes. Returns positions [B, N]."""
        shifts = tuple(row.now.shift for row in self.rows)
        if not any(shifts):
            return places
        return places + cache_tensor(to_device, shifts, places.device)[:, None]

    @property
    def states(self) -> list[States]:
        """States of recurrent layers after the committed tokens, by sequence."""
        return [row.now.states for row in self.rows]

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's recurrent states: before and after a forward, and in snapshots."""
        held = 0
        for state in self.states[0]:
            held += sum(part.nbytes for part in state.values())
        return (2 + MAX_SNAPSHOTS) * held

    @property
    def end(self) -> int:
        """The column that the next forward writes at, in layers without a window."""
        return max(self.lengths, default=0)

    def list_first_positions(self, window: int | None) -> list[int]:
        """List, by sequence, the position that the first column of layers of that window holds."""
        return [find_first_seen(row.now.base, window) for row in self.rows]

    def find_write_columns(self, window: int | None) -> tuple[int, int]:
        """Return the first column that a forward attends to, and the column that it writes at."""
        if not self.rows:
            return 0, 0
        pairs = zip(self.lengths, self.list_first_positions(window), strict=True)
        held = [length - start for length, start in pairs]
        return find_first_seen(min(held), window), max(held)

    def mask_positions(self, places: Tensor, free: int, window: int | None) -> Tensor:
        """Return [B, X] the positions of the columns that a mask of layers of that window covers.

        Args:
            places: [B, T] positions of all columns, committed and uncommitted, in a layer without a window.
            free: number of first columns of a layer without a window that need no mask.
            window: of the layers, None for layers without.
        """
        if window is None:
            return places[:, free:]
        first, end = self.find_write_columns(window)
        columns = torch.arange(first, end, device=places.device)
        index = to_device(self.list_first_positions(window), places.device)[:, None] + columns
        # The root's column stands in for columns beyond the longest sequence: no node sees them.
        committed = places.gather(1, index.clamp_max(self.end))
        return torch.cat([committed, places[:, self.end :]], dim=1)

    def reserve(self, columns: int) -> None:
        """Allocate columns in every layer, if the length is known beforehand."""
        for layer in self.tree_layers:
            layer.reserve(layer.limit_columns(columns))

    @torch.no_grad()
    def commit(self, nodes: Sequence[Sequence[int]]) -> None:
        """Keep each sequence's accepted nodes of the last forward, and forget all others.

        nodes: by sequence, the accepted nodes' numbers in its tree, ascending. In the drawing of this module, with
        rows of four and two tokens:

            commit([[0, 2], [0, 1, 4]])      row 0: column 6 to 5; node 0 needs no move
                                             row 1: columns 4, 5, 8 to 2, 3, 4
        """
        # 1. The columns of the accepted nodes, in every layer.
        self._move_columns(nodes)

        # 2. Bring the recurrent states to the accepted nodes, and set the new lengths.
        states_after = self.states
        if self.recurrent and any(nodes):
            states_after = self.recurrent.compute_committed_states(self, nodes)
        rows = []
        for number, accepted in enumerate(nodes):
            earlier, snapshot = self.rows[number]
            now = snapshot._replace(
                length=snapshot.length + len(accepted),
                states=states_after[number],
                tokens=self._extend_tokens(number, accepted),
            )
            rows.append(CacheRow(earlier, now))
        self._hold(rows)

        # 3. Drop columns that no window reaches.
        smallest = self.smallest_window
        for number, row in enumerate(rows):
            if smallest and row.now.length - max(row.now.base, smallest) > self.rewind_room:
                self._drop(number, row.now.length - 2 * self.rewind_room // 3)

    def _move_columns(self, nodes: Sequence[Sequence[int]]) -> None:
        """Copy the columns of accepted nodes behind their sequences. nodes: as in `commit`."""
        if len(nodes) == 1 and list(nodes[0]) == list(range(len(nodes[0]))):
            return  # the first nodes of a single sequence are behind it already
        for window in self.layer_windows:
            moves = self._list_moves(nodes, window)
            if moves:
                layers = [layer for layer in self.tree_layers if layer.window == window]
                move_columns(layers, moves)

    def _list_moves(self, nodes: Sequence[Sequence[int]], window: int | None) -> list[ColumnMove]:
        """List the accepted nodes that are not in their columns yet, in layers of that window."""
        _, end = self.find_write_columns(window)
        rows = zip(self.lengths, self.list_first_positions(window), nodes, strict=True)
        moves = []
        for row, (length, start, accepted) in enumerate(rows):
            for place, node in enumerate(accepted, length - start):
                if end + node != place:
                    moves.append(ColumnMove(row, end + node, place))
        return moves

    def _extend_tokens(self, row: int, kept: Sequence[int]) -> Tensor | None:
        """Return the tokens of a sequence with those of its accepted nodes; None if tokens are not kept."""
        before = self.rows[row].now
        if self.tokens is None or (before.tokens is None and before.length):
            return None
        accepted = self.tokens[row, list(kept)]
        if before.tokens is None:
            return accepted
        return torch.cat([before.tokens, accepted])

    def _drop(self, row: int, base: int) -> None:
        """Drop the columns that no length from `base` on needs; an interrupt leaves no sequence."""
        rows, self.rows = self.rows, []
        earlier, now = rows[row]
        for layer in self.tree_layers:
            if not layer.window:
                continue
            old_start = find_first_seen(now.base, layer.window)
            new_start = find_first_seen(base, layer.window)
            for states in layer.storage:
                kept = states[row, :, new_start - old_start : now.length - old_start].clone()
                states[row, :, : now.length - new_start] = kept
        after = CacheRow(earlier, now._replace(base=base))
        self._hold(replace_at(rows, row, after))

    def rewind(self, lengths: Sequence[int]) -> None:
        """Truncate each sequence to at most `lengths`: read `self.lengths` afterwards.

        A recurrent layer keeps snapshots of a few lengths only: a sequence with such layers is cut
        to the longest of them that is at most the length asked for. A layer with a window has dropped
        columns: a sequence is cut to nothing if it lacks the columns of the length asked for.
        """
        missing = len(lengths) - len(self.rows)
        held = self.rows + [make_empty_row()] * missing
        rows = []
        for row, length in zip(held, lengths, strict=True):
            cut = self._cut(row, length)
            if cut.now.length < cut.now.base:
                cut = make_empty_row()
            rows.append(cut)
        self._hold(rows)

    def _cut(self, row: CacheRow, length: int) -> CacheRow:
        """Return the longest kept snapshot of at most `length` tokens."""
        if not self.recurrent:
            return CacheRow([], row.now.cut(length))
        if length >= row.now.length:
            return row
        earlier = [mark for mark in row.earlier if mark.length <= length]
        latest = CacheSnapshot(0, [])
        if earlier:
            latest = earlier[-1]
        return CacheRow(earlier, latest._replace(base=row.now.base))

    def shift(self, by: int) -> None:
        """Set the `shift` of the only sequence."""
        (row,) = self.rows
        earlier = [mark._replace(shift=by) for mark in row.earlier]
        self.rows = [CacheRow(earlier, row.now._replace(shift=by))]

    def replace_with(self, is_long: bool) -> None:
        """Replace the only sequence by an empty one with that kind of rotary factors."""
        self.rows = [make_empty_row(is_long)]

    def mark(self) -> None:
        """Keep snapshots of the current lengths, for `rewind`."""
        for number, (earlier, now) in enumerate(self.rows):
            if all(now.length != mark.length for mark in earlier):
                marks = earlier + [now]
                self.rows[number] = CacheRow(marks[-MAX_SNAPSHOTS:], now)

    def _hold(self, rows: list[CacheRow]) -> None:
        self.rows = rows
        self.write_after(0)

    def write_after(self, nodes: int) -> None:
        """Until the next commit or rewind, forwards write after that many uncommitted nodes of earlier forwards."""
        for window in self.layer_windows:
            first, end = self.find_write_columns(window)
            for layer in self.tree_layers:
                if layer.window == window:
                    layer.first = first
                    layer.length = end + nodes

    @contextmanager
    def writing_after(self, nodes: int) -> Iterator[None]:
        """Inside, forwards write after that many uncommitted nodes of earlier forwards."""
        try:
            self.write_after(nodes)
            yield
        finally:
            self.write_after(0)

    @contextmanager
    def padding_after(self, counts: Sequence[int]) -> Iterator[None]:
        """Inside, forwards need not compute the nodes after the first `counts` of each sequence."""
        self.node_counts = counts
        try:
            yield
        finally:
            self.node_counts = None

    def select(self, rows: Sequence[int]) -> None:
        """Keep these sequences, in this order."""
        selected, self.rows = [self.rows[row] for row in rows], []
        for layer in self.tree_layers:
            layer.gather([(layer, rows)], layer.capacity)
        self._hold(selected)

    def put(self, row: int, cache: "TreeCache") -> None:
        """Replace a row's sequence by the only sequence of another cache. No other row is copied."""
        rows, self.rows = replace_at(self.rows, row, cache.rows[0]), []
        for layer, new in zip(self.tree_layers, cache.tree_layers, strict=True):
            layer.put(row, new)
        self._hold(rows)

    def join(self, others: Sequence["TreeCache"], row: int | None = None) -> None:
        """Append the sequences of other caches of the same model. row: append only that row of each."""
        joined = []
        row_numbers: list[Sequence[int]] = []
        for cache in others:
            numbers: Sequence[int] = range(len(cache.rows))
            if row is not None:
                numbers = [row]
            row_numbers.append(numbers)
            joined += [cache.rows[number] for number in numbers]
        held_rows, self.rows = self.rows, []
        for number, layer in enumerate(self.tree_layers):
            parts: list[tuple[TreeLayer, Sequence[int]]] = [(layer, range(len(held_rows)))]
            for cache, numbers in zip(others, row_numbers, strict=True):
                parts.append((cache.tree_layers[number], numbers))
            layer.gather(parts, max(part.capacity for part, _ in parts))
        self._hold(held_rows + joined)

    def copy_sequence(self, row: int, capacity: int = 1) -> "TreeCache":
        """Copy one sequence into a new cache. capacity: columns to allocate at least."""
        layers = len(self.tree_layers)
        copy = TreeCache(layers, 512, self.recurrent, self.windows, self.rewind_room)
        for new_layer, layer in zip(copy.tree_layers, self.tree_layers, strict=True):
            if layer.storage:
                held = self.lengths[row] - self.list_first_positions(layer.window)[row]
                new_layer.gather([(layer, [row])], max(layer.limit_columns(capacity), held))
        copy._hold([self.rows[row]])
        return copy
