"""The cache of B sequences: a forward writes N nodes into each row, and each keeps accepted ones.

A layer's storage is [B, KV heads, capacity, head_dim], so that the columns of one KV head lie
together. A forward writes all rows at the same columns, after the longest sequence. `commit` moves a
sequence's accepted nodes to its end and forgets all others:

    committed      a forward over 5 nodes       commit([[0, 2], [0, 1, 4]])
    | a b c d      | a b c d 0 1 2 3 4          | a b c d 0 2
    | p q          | p q . . 0 1 2 3 4          | p q 0 1 4

Gaps are masked but stay finite: 0 · NaN is NaN.

A layer with a window keeps the latest columns of each sequence alone. `commit` drops older ones, a
few hundred at a time, and moves the rest to the front. Five tokens under a window of 2, of which
`rewind` may take back one:

    a b c d e      after commit    d e
    p q                            p q

The first sequence can be cut to a b c d, as the next position sees d and itself, or to nothing.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from treespec.model.cache_layer import ColumnMove, TreeLayer, flatten_moves
from treespec.trees.tree import cache_tensor, to_device

State = dict[tuple[str, int], Tensor]  # [1, ...] each, by kind and number
States = list[State]  # of each recurrent layer; empty before the first token
MAX_SNAPSHOTS = 2  # earlier states of a sequence that are kept
WINDOW_SLACK_TOKENS = (
    1536  # committed tokens of which layers keep more than their windows; a third goes at once
)
MAX_FORWARD_NODES = 512  # nodes of a forward that layers with a window have room for


class CacheSnapshot(NamedTuple):
    """A length of a sequence, and the states after it.

    base: the shortest length that `rewind` can go back to, but for 0. A layer of window w holds the
    positions from base + 1 - w on. shift: from the places of its next tokens to their positions, which
    pictures move. is_long: whether its keys have the rotary factors of long texts (`rotary`). tokens:
    [length] int64 of models with such factors; None where they are not known.
    """

    length: int
    states: States
    base: int = 0
    shift: int = 0
    is_long: bool = False
    tokens: Tensor | None = None

    def cut(self, length: int) -> "CacheSnapshot":
        """The same of the first `length` tokens."""
        if self.tokens is None:
            return self._replace(length=length)
        return self._replace(length=length, tokens=self.tokens[:length])


class CacheRow(NamedTuple):
    """A sequence of a cache: what it holds `now`, and the `earlier` marks that `rewind` may go back to."""

    earlier: list[CacheSnapshot]
    now: CacheSnapshot


def make_empty_row(is_long: bool = False) -> CacheRow:
    """A sequence without tokens. is_long: of its keys, as in `CacheSnapshot`."""
    return CacheRow([], CacheSnapshot(0, [], is_long=is_long))


def find_first_seen(position: int, window: int | None) -> int:
    """The first of the last `window` positions up to this one; 0 without a window."""
    if not window:
        return 0
    return max(0, position + 1 - window)


class RecurrentStates(Protocol):
    """The recurrent layers of a model (`recurrent`)."""

    def build_layers(self, capacity: int) -> list[TreeLayer]: ...
    def compute_committed_states(
        self, cache: "TreeCache", nodes: Sequence[Sequence[int]]
    ) -> list[States]: ...


@final
class TreeCache(Cache):
    """The `Cache` of a transformers model, with a `TreeLayer` for each layer.

    rows: of each sequence its committed length, the states of recurrent layers after it, and earlier
    ones that `rewind` can go back to. forwarded: kept from the last forward by each recurrent layer.
    tokens: [B, N] of the last forward, where the sequences' tokens are kept.

    `select`, `put`, `join` and a `commit` that drops columns empty the rows while they move batch
    rows. So a cache without rows is one whose change was interrupted, and `Decoder` makes a new one.
    All other changes leave committed columns alone; after an interrupt, `rewind` makes the cache
    whole again.
    """

    def __init__(
        self,
        layers: int,
        capacity: int = 512,
        recurrent: RecurrentStates | None = None,
        windows: Sequence[int | None] = (),
        slack: int = WINDOW_SLACK_TOKENS,
    ) -> None:
        """recurrent: of the model, if any of its layers carry a state from token to token.

        windows: of each layer, in positions; None for all. slack: committed tokens behind the one
        that layers with a window hold whole.
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
        self.rows = [make_empty_row()]
        self.forwarded: dict[int, Any] = {}
        self.tokens: Tensor | None = None
        super().__init__(layers=list(self.tree_layers))

    @property
    def lengths(self) -> list[int]:
        """Committed positions of each sequence."""
        return [row.now.length for row in self.rows]

    def shift_positions(self, places: Tensor) -> Tensor:
        """[B, N] positions of nodes of each sequence, from their places [B, N]."""
        shifts = tuple(row.now.shift for row in self.rows)
        if not any(shifts):
            return places
        return places + cache_tensor(to_device, shifts, places.device)[:, None]

    @property
    def states(self) -> list[States]:
        """States of recurrent layers after each sequence's committed tokens."""
        return [row.now.states for row in self.rows]

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's recurrent states: before and after a forward, and to go back to."""
        held = 0
        for state in self.states[0]:
            held += sum(part.nbytes for part in state.values())
        return (2 + MAX_SNAPSHOTS) * held

    @property
    def end(self) -> int:
        """The column that the next forward writes at, in layers without a window."""
        return max(self.lengths, default=0)

    def list_first_positions(self, window: int | None) -> list[int]:
        """The position of each sequence that lies in the first column of layers of that window."""
        return [find_first_seen(row.now.base, window) for row in self.rows]

    def find_write_columns(self, window: int | None) -> tuple[int, int]:
        """The first column that a forward attends to, and the one that it writes at."""
        if not self.rows:
            return 0, 0
        pairs = zip(self.lengths, self.list_first_positions(window), strict=True)
        held = [length - start for length, start in pairs]
        return find_first_seen(min(held), window), max(held)

    def mask_positions(self, places: Tensor, free: int, window: int | None) -> Tensor:
        """[B, X] the positions of those columns that a mask of layers of a window is for.

        places: [B, T] positions of the committed columns of a layer without a window, and of others.
        free: the first columns of a layer without a window that need no mask.
        """
        if window is None:
            return places[:, free:]
        first, end = self.find_write_columns(window)
        columns = torch.arange(first, end, device=places.device)
        index = to_device(self.list_first_positions(window), places.device)[:, None] + columns
        # The root's column stands for those beyond the longest sequence: no node sees either.
        known = places.gather(1, index.clamp_max(self.end))
        return torch.cat([known, places[:, self.end :]], dim=1)

    def reserve(self, columns: int) -> None:
        """Allocate columns in every layer, where the length is known beforehand."""
        for layer in self.tree_layers:
            layer.reserve(layer.limit_columns(columns))

    @torch.no_grad()
    def commit(self, nodes: Sequence[Sequence[int]]) -> None:
        """Keep each sequence's accepted nodes of the last forward, ascending, and forget all others.

        nodes: of each sequence, their numbers in its tree. In the drawing of this module, of rows of four
        and two tokens:

            commit([[0, 2], [0, 1, 4]])      row 0: column 6 to 5; node 0 is in its place
                                             row 1: columns 4, 5, 8 to 2, 3, 4
        """

        # 1. The columns to move. Layers of equal shape, window and device share one index.
        @functools.cache
        def list_moves(window: int | None) -> list[ColumnMove]:
            return self._list_moves(nodes, window)

        @functools.cache
        def flatten(window: int | None, device: torch.device, heads: int, capacity: int) -> Tensor:
            return to_device(flatten_moves(list_moves(window), heads, capacity), device)

        # 2. Copy them in every layer.
        for layer in self.tree_layers:
            if not list_moves(layer.window):
                continue
            for states in layer.storage:
                _, heads, capacity, _ = states.shape
                sources, places = flatten(layer.window, states.device, heads, capacity)
                entries = states.flatten(0, 2)
                entries.index_copy_(0, places, entries.index_select(0, sources))

        # 3. Bring the recurrent states to the accepted nodes, and set the new lengths.
        states_after = self.states
        if self.recurrent and any(nodes):
            states_after = self.recurrent.compute_committed_states(self, nodes)
        rows = []
        for number, kept in enumerate(nodes):
            earlier, before = self.rows[number]
            now = before._replace(
                length=before.length + len(kept),
                states=states_after[number],
                tokens=self._extend_tokens(number, kept),
            )
            rows.append(CacheRow(earlier, now))
        self._hold(rows)

        # 4. Drop columns that no window reaches.
        smallest = min(filter(None, self.windows), default=0)
        for number, row in enumerate(rows):
            if smallest and row.now.length - max(row.now.base, smallest) > self.rewind_room:
                self._drop(number, row.now.length - 2 * self.rewind_room // 3)

    def _list_moves(self, nodes: Sequence[Sequence[int]], window: int | None) -> list[ColumnMove]:
        """The accepted nodes that are not in their columns yet, in layers of a window."""
        _, end = self.find_write_columns(window)
        rows = zip(self.lengths, self.list_first_positions(window), nodes, strict=True)
        moves = []
        for row, (length, start, kept) in enumerate(rows):
            for place, node in enumerate(kept, length - start):
                if end + node != place:
                    moves.append(ColumnMove(row, end + node, place))
        return moves

    def _extend_tokens(self, row: int, kept: Sequence[int]) -> Tensor | None:
        """The tokens of a sequence and of its accepted nodes, where they are kept."""
        before = self.rows[row].now
        if self.tokens is None or (before.tokens is None and before.length):
            return None
        accepted = self.tokens[row, list(kept)]
        if before.tokens is None:
            return accepted
        return torch.cat([before.tokens, accepted])

    def _drop(self, row: int, base: int) -> None:
        """Keep of a sequence what lengths from `base` on need; an interrupt leaves no sequence."""
        rows, self.rows = self.rows, []
        earlier, now = rows[row]
        for layer in self.tree_layers:
            if not layer.window:
                continue
            before = find_first_seen(now.base, layer.window)
            start = find_first_seen(base, layer.window)
            for states in layer.storage:
                kept = states[row, :, start - before : now.length - before].clone()
                states[row, :, : now.length - start] = kept
        after = CacheRow(earlier, now._replace(base=base))
        self._hold(replace_at(rows, row, after))

    def rewind(self, lengths: Sequence[int]) -> None:
        """Truncate each sequence to `lengths`: read `self.lengths` afterwards.

        A recurrent layer keeps its states after a few lengths only. A sequence with such layers is cut
        to the nearest of those lengths, at most the one asked for. A layer with a window has dropped
        columns: a sequence is cut to nothing where it does not have those of the length asked for.
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
        """The sequence of at most `length` tokens whose states are kept."""
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
        """Set the shift of the only sequence."""
        (row,) = self.rows
        earlier = [mark._replace(shift=by) for mark in row.earlier]
        self.rows = [CacheRow(earlier, row.now._replace(shift=by))]

    def replace_with(self, is_long: bool) -> None:
        """Set the kind of rotary factors of the only sequence, which is empty."""
        self.rows = [make_empty_row(is_long)]

    def mark(self) -> None:
        """Keep the recurrent states of the present lengths, for `rewind`."""
        for number, (earlier, now) in enumerate(self.rows):
            if all(now.length != mark.length for mark in earlier):
                marks = earlier + [now]
                self.rows[number] = CacheRow(marks[-MAX_SNAPSHOTS:], now)

    def _hold(self, rows: list[CacheRow]) -> None:
        self.rows = rows
        self.write_after(0)

    def write_after(self, nodes: int) -> None:
        """Until the next commit or rewind, forwards write after that many uncommitted nodes."""
        columns = functools.cache(
            self.find_write_columns
        )  # layers of equal windows have equal columns
        for layer in self.tree_layers:
            layer.first, end = columns(layer.window)
            layer.length = end + nodes

    @contextmanager
    def writing_after(self, nodes: int) -> Iterator[None]:
        """Inside, forwards write after that many uncommitted nodes of earlier forwards."""
        try:
            self.write_after(nodes)
            yield
        finally:
            self.write_after(0)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these sequences, in this order."""
        kept, self.rows = [self.rows[row] for row in rows], []
        for layer in self.tree_layers:
            layer.gather([(layer, rows)], layer.capacity)
        self._hold(kept)

    def put(self, row: int, cache: "TreeCache") -> None:
        """Replace a row's sequence by the only one of another cache. No other row is copied."""
        rows, self.rows = replace_at(self.rows, row, cache.rows[0]), []
        for layer, new in zip(self.tree_layers, cache.tree_layers, strict=True):
            layer.put(row, new)
        self._hold(rows)

    def join(self, others: Sequence["TreeCache"], row: int | None = None) -> None:
        """Append the sequences of other caches of the same model. row: only that one of each."""
        joined = []
        taken: list[Sequence[int]] = []
        for cache in others:
            numbers: Sequence[int] = range(len(cache.rows))
            if row is not None:
                numbers = [row]
            taken.append(numbers)
            joined += [cache.rows[number] for number in numbers]
        own, self.rows = self.rows, []
        for number, layer in enumerate(self.tree_layers):
            parts: list[tuple[TreeLayer, Sequence[int]]] = [(layer, range(len(own)))]
            for cache, numbers in zip(others, taken, strict=True):
                parts.append((cache.tree_layers[number], numbers))
            layer.gather(parts, max(part.capacity for part, _ in parts))
        self._hold(own + joined)

    def copy_sequence(self, row: int, capacity: int = 1) -> "TreeCache":
        """A copy of one sequence, in a cache of its own. capacity: columns to allocate at least."""
        layers = len(self.tree_layers)
        copy = TreeCache(layers, 512, self.recurrent, self.windows, self.rewind_room)
        for own, layer in zip(copy.tree_layers, self.tree_layers, strict=True):
            if layer.storage:
                held = self.lengths[row] - self.list_first_positions(layer.window)[row]
                own.gather([(layer, [row])], max(layer.limit_columns(capacity), held))
        copy._hold([self.rows[row]])
        return copy


def replace_at(rows: Sequence[CacheRow], number: int, row: CacheRow) -> list[CacheRow]:
    """A copy of the list with another row in that place."""
    changed = list(rows)
    changed[number] = row
    return changed
