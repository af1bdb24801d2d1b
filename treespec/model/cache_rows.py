"""What the cache keeps of each sequence beside keys and values."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

State = dict[tuple[str, int], Tensor]  # {(kind, number): [1, ...]} of one recurrent layer
States = list[State]  # by recurrent layer; empty before the first token


class CacheSnapshot(NamedTuple):
    """A length of a sequence, and the recurrent states after that many tokens.

    Attributes:
        length: committed tokens.
        states: of recurrent layers.
        base: the shortest length above 0 that `rewind` can go back to. A layer of window w holds the
            positions from base + 1 - w on.
        shift: position minus index of the next tokens; pictures make it differ from 0.
        is_long: whether its keys have the rotary factors of long texts (`treespec.model.rotary`).
        tokens: [length] int64 in models with such factors; None if they are not known.
    """

    length: int
    states: States
    base: int = 0
    shift: int = 0
    is_long: bool = False
    tokens: Tensor | None = None

    def cut(self, length: int) -> "CacheSnapshot":
        """Return the snapshot of the first `length` tokens."""
        if self.tokens is None:
            return self._replace(length=length)
        return self._replace(length=length, tokens=self.tokens[:length])


class CacheRow(NamedTuple):
    """A sequence of a cache: its state `now`, and the `earlier` snapshots that `rewind` may go back to."""

    earlier: list[CacheSnapshot]
    now: CacheSnapshot


def make_empty_row(is_long: bool = False) -> CacheRow:
    """Return a sequence without tokens. is_long: as in `CacheSnapshot`."""
    return CacheRow([], CacheSnapshot(0, [], is_long=is_long))


def find_first_seen(position: int, window: int | None) -> int:
    """Return the first position that a token at `position` sees; 0 without a window."""
    if not window:
        return 0
    return max(0, position + 1 - window)


def replace_at(rows: Sequence[CacheRow], number: int, row: CacheRow) -> list[CacheRow]:
    """Return a copy of the list with another row at that index."""
    changed = list(rows)
    changed[number] = row
    return changed
