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

from treespec.model.cache_layer import TreeLayer
from treespec.trees.tree import made, sent

State = dict[tuple[str, int], Tensor]  # [1, ...] each, by kind and number
States = list[State]  # of each recurrent layer; empty before the first token
MARKS = 2  # earlier states of a sequence that are kept
SLACK = 1536  # committed tokens of which layers keep more than their windows; a third goes at once
FORWARD = 512  # nodes of a forward that layers with a window have room for


class Mark(NamedTuple):
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

    def cut(self, length: int) -> "Mark":
        """The same of the first `length` tokens."""
        tokens = None if self.tokens is None else self.tokens[:length]
        return self._replace(length=length, tokens=tokens)


def first_seen(position: int, window: int | None) -> int:
    """The first of the last `window` positions up to this one; 0 without a window."""
    return max(0, position + 1 - window) if window else 0


class Recurrent(Protocol):
    """The recurrent layers of a model (`recurrent`)."""

    def layers(self, capacity: int) -> list[TreeLayer]: ...
    def committed(self, cache: "TreeCache", nodes: Sequence[Sequence[int]]) -> list[States]: ...


@final
class TreeCache(Cache):
    """The `Cache` of a transformers model, with a `TreeLayer` for each layer.

    rows: of each sequence what `rewind` can go back to, and last its committed length and the states of
    recurrent layers after it. forwarded: kept from the last forward by each recurrent layer. tokens:
    [B, N] of the last forward, where the sequences' tokens are kept.

    `select`, `put`, `join` and a `commit` that drops columns empty the rows while they move batch
    rows. So a cache without rows is one whose change was interrupted, and `Decoder` makes a new one.
    All other changes leave committed columns alone; after an interrupt, `rewind` makes the cache
    whole again.
    """

    def __init__(
        self,
        layers: int,
        capacity: int = 512,
        recurrent: Recurrent | None = None,
        windows: Sequence[int | None] = (),
        slack: int = SLACK,
    ) -> None:
        """recurrent: of the model, if any of its layers carry a state from token to token.

        windows: of each layer, in positions; None for all. slack: committed tokens behind the one
        that layers with a window hold whole.
        """
        plain = [TreeLayer(capacity) for _ in range(layers)]
        self.tree_layers = recurrent.layers(capacity) if recurrent else plain
        self.recurrent, self.windows, self.slack = recurrent, windows, slack
        for layer, window in zip(self.tree_layers, windows, strict=False):
            if window:
                layer.window, layer.most = window, window + slack + FORWARD
                layer.capacity = min(capacity, layer.most)
        self.rows: list[list[Mark]] = [[Mark(0, [])]]
        self.forwarded: dict[int, Any] = {}
        self.tokens: Tensor | None = None
        super().__init__(layers=list(self.tree_layers))

    @property
    def lengths(self) -> list[int]:
        """Committed positions of each sequence."""
        return [row[-1].length for row in self.rows]

    def shifted(self, places: Tensor) -> Tensor:
        """[B, N] positions of nodes of each sequence, from their places [B, N]."""
        shifts = tuple(row[-1].shift for row in self.rows)
        return places + made(sent, shifts, places.device)[:, None] if any(shifts) else places

    @property
    def states(self) -> list[States]:
        """States of recurrent layers after each sequence's committed tokens."""
        return [row[-1].states for row in self.rows]

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's recurrent states: before and after a forward, and to go back to."""
        return (2 + MARKS) * sum(x.nbytes for state in self.states[0] for x in state.values())

    @property
    def end(self) -> int:
        """The column that the next forward writes at, in layers without a window."""
        return max(self.lengths, default=0)

    def starts(self, window: int | None) -> list[int]:
        """The position of each sequence that lies in the first column of layers of that window."""
        return [first_seen(row[-1].base, window) for row in self.rows]

    def columns(self, window: int | None) -> tuple[int, int]:
        """The first column that a forward attends to, and the one that it writes at."""
        pairs = zip(self.lengths, self.starts(window), strict=True)
        held = [length - start for length, start in pairs] or [0]
        return first_seen(min(held), window), max(held)

    def shown(self, places: Tensor, free: int, window: int | None) -> Tensor:
        """[B, X] the positions of those columns that a mask of layers of a window is for.

        places: [B, T] positions of the committed columns of a layer without a window, and of others.
        free: the first columns of a layer without a window that need no mask.
        """
        if window is None:
            return places[:, free:]
        first, end = self.columns(window)
        columns = torch.arange(first, end, device=places.device)
        index = sent(self.starts(window), places.device)[:, None] + columns
        # The root's column stands for those beyond the longest sequence: no node sees either.
        known = places.gather(1, index.clamp_max(self.end))
        return torch.cat([known, places[:, self.end :]], dim=1)

    def reserve(self, columns: int) -> None:
        """Allocate columns in every layer, where the length is known beforehand."""
        for layer in self.tree_layers:
            layer.reserve(min(columns, layer.most or columns))

    @torch.no_grad()
    def commit(self, nodes: Sequence[Sequence[int]]) -> None:
        """Keep each sequence's accepted nodes of the last forward, ascending, and forget all others."""

        # 1. The columns to move: (batch row, from, to). Nodes already in place are not copied.
        @functools.cache
        def moves(window: int | None) -> list[tuple[int, int, int]]:
            end, found = self.columns(window)[1], []
            rows = zip(self.lengths, self.starts(window), nodes, strict=True)
            for row, (length, start, kept) in enumerate(rows):
                columns = [(end + node, length - start + i) for i, node in enumerate(kept)]
                found += [(row, source, place) for source, place in columns if source != place]
            return found

        # 2. Copy them in every layer. Layers of equal shape, window and device share one index.
        @functools.cache
        def flat(window: int | None, device: torch.device, heads: int, capacity: int) -> Tensor:
            row, source, place = torch.tensor(moves(window)).T
            head = row * heads + torch.arange(heads)[:, None]  # [heads, moves]
            index = head * capacity + torch.stack([source, place])[:, None]
            return sent(index.flatten(1), device)

        for layer in self.tree_layers:
            for states in layer.storage if moves(layer.window) else ():
                sources, places = flat(layer.window, states.device, *states.shape[1:3])
                entries = states.flatten(0, 2)
                entries.index_copy_(0, places, entries.index_select(0, sources))

        # 3. Bring the recurrent states to the accepted nodes, and set the new lengths.
        after, rows = self.states, []
        if self.recurrent and any(nodes):
            after = self.recurrent.committed(self, nodes)
        for row, ((*marks, now), own, kept) in enumerate(zip(self.rows, after, nodes, strict=True)):
            tokens, length = self._tokens_after(row, kept), now.length + len(kept)
            rows.append([*marks, now._replace(length=length, states=own, tokens=tokens)])
        self._hold(rows)

        # 4. Drop columns that no window reaches.
        smallest = min(filter(None, self.windows), default=0)
        for row, (*_, now) in enumerate(rows):
            if smallest and now.length - max(now.base, smallest) > self.slack:
                self._drop(row, now.length - 2 * self.slack // 3)

    def _tokens_after(self, row: int, kept: Sequence[int]) -> Tensor | None:
        """The tokens of a sequence and of its accepted nodes, where they are kept."""
        before = self.rows[row][-1]
        if self.tokens is None or (before.tokens is None and before.length):
            return None
        new = self.tokens[row, list(kept)]
        return new if before.tokens is None else torch.cat([before.tokens, new])

    def _drop(self, row: int, base: int) -> None:
        """Keep of a sequence what lengths from `base` on need; an interrupt leaves no sequence."""
        rows, self.rows = self.rows, []
        *marks, now = rows[row]
        for layer in self.tree_layers:
            for states in layer.storage if layer.window else ():
                before, start = (first_seen(n, layer.window) for n in (now.base, base))
                kept = states[row, :, start - before : now.length - before].clone()
                states[row, :, : now.length - start] = kept
        after = [*marks, now._replace(base=base)]
        self._hold([*rows[:row], after, *rows[row + 1 :]])

    def rewind(self, lengths: Sequence[int]) -> None:
        """Truncate each sequence to `lengths`: read `self.lengths` afterwards.

        A recurrent layer keeps its states after a few lengths only. A sequence with such layers is cut
        to the nearest of those lengths, at most the one asked for. A layer with a window has dropped
        columns: a sequence is cut to nothing where it does not have those of the length asked for.
        """
        rows, nothing = [], Mark(0, [])
        held = self.rows + [[nothing]] * (len(lengths) - len(self.rows))
        for (*marks, now), length in zip(held, lengths, strict=True):
            if not self.recurrent:
                marks, now = [], now.cut(length)
            elif length < now.length:
                marks = [mark for mark in marks if mark.length <= length]
                now = (marks or [nothing])[-1]._replace(base=now.base)
            rows.append([*marks, now] if now.length >= now.base else [nothing])
        self._hold(rows)

    def shift(self, by: int) -> None:
        """Set the shift of the only sequence."""
        self.rows = [[mark._replace(shift=by) for mark in self.rows[0]]]

    def become(self, is_long: bool) -> None:
        """Set the kind of rotary factors of the only sequence, which is empty."""
        self.rows = [[Mark(0, [], is_long=is_long)]]

    def mark(self) -> None:
        """Keep the recurrent states of the present lengths, for `rewind`."""
        for number, (*marks, now) in enumerate(self.rows):
            if all(now.length != mark.length for mark in marks):
                self.rows[number] = [*[*marks, now][-MARKS:], now]

    def _hold(self, rows: list[list[Mark]]) -> None:
        self.rows = rows
        self.write_after(0)

    def write_after(self, nodes: int) -> None:
        """Until the next commit or rewind, forwards write after that many uncommitted nodes."""
        columns = {window: self.columns(window) for window in {None, *self.windows}}
        for layer in self.tree_layers:
            layer.first, end = columns[layer.window]
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

    def put(self, row: int, other: "TreeCache") -> None:
        """Replace a row's sequence by the only one of another cache. No other row is copied."""
        rows, self.rows = [*self.rows[:row], other.rows[0], *self.rows[row + 1 :]], []
        for layer, new in zip(self.tree_layers, other.tree_layers, strict=True):
            layer.put(row, new)
        self._hold(rows)

    def join(self, others: Sequence["TreeCache"], row: int | None = None) -> None:
        """Append the sequences of other caches of the same model. row: that one of each alone."""
        taken = [[*range(len(other.rows))] if row is None else [row] for other in others]
        joined = [other.rows[i] for other, rows in zip(others, taken, strict=True) for i in rows]
        own, self.rows = self.rows, []
        for number, layer in enumerate(self.tree_layers):
            theirs = [other.tree_layers[number] for other in others]
            parts = [(layer, range(len(own))), *zip(theirs, taken, strict=True)]
            layer.gather(parts, max(one.capacity for one, _ in parts))
        self._hold([*own, *joined])

    def alone(self, row: int, capacity: int = 1) -> "TreeCache":
        """A copy of one sequence, in a cache of its own. capacity: columns to allocate at least."""
        layers = len(self.tree_layers)
        copy = TreeCache(layers, 512, self.recurrent, self.windows, self.slack)
        for own, layer in zip(copy.tree_layers, self.tree_layers, strict=True):
            if layer.storage:
                held = self.lengths[row] - self.starts(layer.window)[row]
                own.gather([(layer, [row])], max(min(capacity, layer.most or capacity), held))
        copy._hold([self.rows[row]])
        return copy
