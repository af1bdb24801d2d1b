"""The recurrent states of B texts: those after the committed tokens, and earlier ones to go back to.

A forward leaves these states alone and keeps the mixers' inputs at each uncommitted column. `commit`
runs each mixer once more over the inputs of the accepted nodes. In a chain that is accepted whole,
the forward has left the states already. Five drafted nodes, of which the path 0 2 4 is accepted:

    states after     forward: inputs of      commit([[0, 2, 4]])
    a b c            0 1 2 3 4               mixers over 0 2 4: states after a b c 0 2 4
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from treespec.model.cache import TreeCache
from treespec.model.recurrent_mixers import Arguments, Mixer, State
from treespec.model.recurrent_rows import Known, read_back
from treespec.model.recurrent_run import Call

MARKS = 2  # earlier states of a text that are kept
States = list[list[State]]  # of each mixer, or after each token


@final
@dataclass
class Forwarded:
    """What the last forward left of a mixer.

    steps: its inputs at the U uncommitted columns, [B, U, ...] by argument.
    constant: its other arguments. after: states [B, ...] of texts whose columns are all accepted;
    none where the forward was no chain. known: outputs of its linear layers.
    trail: states [R, ...] after each of L tokens of each row, where the code took tokens one by one.
    outputs: [B, N] int64, the place of each node among the R * L of the trail.
    """

    constant: Arguments
    steps: dict[str, Tensor]
    after: list[State]
    known: Known
    trail: States
    outputs: Tensor | None


@final
@dataclass
class Mark:
    """The states of one text after its first `length` tokens."""

    length: int
    states: States


@final
@dataclass
class RecurrentStates:
    """lengths: of the texts. now: states [B, ...] of each mixer; none before the first token."""

    mixers: Sequence[Mixer]
    lengths: list[int] = field(default_factory=lambda: [0])
    now: States = field(init=False)
    marks: list[list[Mark]] = field(default_factory=lambda: [[]])
    forwarded: dict[int, Forwarded] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = [[] for _ in self.mixers]

    @property
    def bytes_of_a_text(self) -> int:
        """Bytes that a text's states take: before and after a forward, and those to go back to."""
        held = [state for states in self.now for state in states if state is not None]
        size = sum(state.numel() * state.element_size() for state in held)
        return (2 + MARKS) * size // len(self.lengths)

    def of(self, number: int) -> list[State]:
        """States [B, ...] of a mixer."""
        return self.now[number] or self.mixers[number].fresh()

    @torch.no_grad()
    def commit(self, cache: TreeCache, nodes: Sequence[Sequence[int]]) -> None:
        """Bring each text's states behind its accepted nodes of the last forward."""
        if not any(nodes):
            return
        now = [self._committed(cache, number, nodes) for number in range(len(self.mixers))]
        lengths = [length + len(kept) for length, kept in zip(self.lengths, nodes, strict=True)]
        self.now, self.lengths = now, lengths

    def _committed(
        self, cache: TreeCache, number: int, nodes: Sequence[Sequence[int]]
    ) -> list[State]:
        """The new states [B, ...] of a mixer."""
        # 1. Texts whose states the forward has left, and texts by the number of accepted nodes.
        mixer, forwarded = self.mixers[number], self.forwarded[number]
        columns = next(iter(forwarded.steps.values())).shape[1]
        whole = list(range(columns))
        groups: dict[int, list[int]] = {}
        for text, kept in enumerate(nodes):
            if kept and not (forwarded.after and list(kept) == whole):
                groups.setdefault(len(kept), []).append(text)
        if forwarded.after and not groups and all(nodes):
            return forwarded.after

        # 2. The others: from the trail, else by the mixer over their accepted nodes.
        before = self.of(number)
        states = list(before)
        again = {text for texts in groups.values() for text in texts}
        left = [text for text, kept in enumerate(nodes) if kept and text not in again]
        if forwarded.after and left:
            states = self._put(states, left, forwarded.after, left)
        if forwarded.trail and forwarded.outputs is not None and again:
            texts = sorted(again)
            last = [nodes[text][-1] for text in texts]
            places = forwarded.outputs[torch.tensor(texts), torch.tensor(last)].tolist()
            new = at_places(forwarded.trail, places)
            return self._put(states, texts, new, range(len(texts)))
        for texts in groups.values():
            rows = torch.tensor(texts)
            columns_kept = torch.tensor([list(nodes[text]) for text in texts])
            steps = {
                name: values[rows[:, None].to(values.device), columns_kept.to(values.device)]
                for name, values in forwarded.steps.items()
            }
            lent = chosen(before, texts)
            code, constant = mixer.module.forward, forwarded.constant
            with read_back(forwarded.known, rows, columns_kept):
                new = Call(mixer, code, cache, constant, steps).run(lent).states
            states = self._put(states, texts, new, range(len(texts)))
        return states

    def _put(
        self,
        states: list[State],
        texts: Sequence[int],
        new: Sequence[State],
        rows: Sequence[int],
    ) -> list[State]:
        """States [B, ...] with those of some texts replaced by rows of others."""
        put: list[State] = []
        for old, other in zip(states, new, strict=True):
            if other is None:
                put.append(old)
                continue
            source = other[torch.tensor(list(rows), device=other.device)]
            if old is None:
                old = source.new_zeros(len(self.lengths), *source.shape[1:])
            put.append(old.index_copy(0, torch.tensor(list(texts), device=old.device), source))
        return put

    def mark(self) -> None:
        """Remember the present states of each text, for `rewind`."""
        for row, (length, marks) in enumerate(zip(self.lengths, self.marks, strict=True)):
            if length and not any(mark.length == length for mark in marks):
                copy = len(self.lengths) > 1  # a view would keep the states of all texts
                states = [chosen(states, [row], copy=copy) for states in self.now]
                self.marks[row] = [*marks, Mark(length, states)][-MARKS:]

    def rewind(self, lengths: Sequence[int]) -> list[int]:
        """Cut each text to a length with a known state, at most `lengths`. Returns the lengths."""
        reached = list(lengths)
        for row, length in enumerate(lengths):
            if length >= self.lengths[row]:
                reached[row] = self.lengths[row]
                continue
            self.marks[row] = [mark for mark in self.marks[row] if mark.length <= length]
            known = max(self.marks[row], key=lambda mark: mark.length, default=Mark(0, []))
            reached[row] = known.length
            if len(lengths) == 1:
                self.now = known.states or [[] for _ in self.mixers]
                continue
            for number, states in enumerate(self.now):
                blank = [
                    state if state is None else torch.zeros_like(state[:1]) for state in states
                ]
                new = known.states[number] if known.states else blank
                self.now[number] = self._put(states, [row], new, [0]) if states else states
        self.lengths = reached
        return reached

    def select(self, rows: Sequence[int]) -> None:
        """Keep these texts, in this order."""
        self.now = [chosen(states, rows) for states in self.now]
        self.marks = [list(self.marks[row]) for row in rows]
        self.lengths = [self.lengths[row] for row in rows]
        self.forwarded = {}

    def join(self, others: Sequence["RecurrentStates"]) -> None:
        """Append the texts of other states of the same model."""
        all_states = [self, *others]
        joined: States = []
        for number in range(len(self.mixers)):
            parts = [states.now[number] for states in all_states]
            known: list[State] = next((part for part in parts if part), [])
            filled: list[State] = []
            for i, like in enumerate(known):
                if like is None:
                    filled.append(None)
                    continue
                tensors = []
                for states, part in zip(all_states, parts, strict=True):
                    shape = (len(states.lengths), *like.shape[1:])
                    state = part[i] if part else None
                    tensors.append(like.new_zeros(shape) if state is None else state)
                filled.append(torch.cat(tensors))
            joined.append(filled)
        self.marks = [marks for states in all_states for marks in states.marks]
        self.lengths = [length for states in all_states for length in states.lengths]
        self.now, self.forwarded = joined, {}

    def put(self, row: int, other: "RecurrentStates") -> None:
        """Replace a text by the only text of others."""
        last = len(self.lengths)
        self.join([other])
        self.select([last if i == row else i for i in range(last)])


def chosen(states: Sequence[State], rows: Sequence[int], copy: bool = True) -> list[State]:
    """The states [rows, ...] of some texts. copy: False for one row, which stays as it is."""
    picked: list[State] = []
    for state in states:
        if state is None:
            picked.append(None)
        elif copy:
            picked.append(state.index_select(0, torch.tensor(list(rows), device=state.device)))
        else:
            picked.append(state[rows[0] : rows[0] + 1])
    return picked


def at_places(trail: States, places: Sequence[int]) -> list[State]:
    """The states [places, ...] at these places among R rows of L tokens. trail: after each token."""
    found: list[State] = []
    for states in zip(*trail, strict=True):
        held = [state for state in states if state is not None]
        rows = [held[place % len(trail)][place // len(trail)] for place in places] if held else []
        found.append(torch.stack(rows) if rows else None)
    return found
