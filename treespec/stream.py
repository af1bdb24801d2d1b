"""An answer: as a stream of pieces while it is decoded, and as a whole."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from treespec.decode import Piece
from treespec.stats import Stats


@dataclass(frozen=True)
class Output:
    """text: without special tokens and stop strings. token_ids: the new ones, the end-of-sequence included."""

    text: str
    token_ids: list[int]
    stats: Stats


@final
class Stream:
    """Iterate over the pieces of an answer; `output` is what there is so far."""

    def __init__(self, pieces: Iterator[Piece], stats: Stats) -> None:
        self._pieces, self._stats = pieces, stats
        self._seen: list[Piece] = []

    def __iter__(self) -> Iterator[Piece]:
        for piece in self._pieces:
            self._seen.append(piece)
            yield piece

    @property
    def output(self) -> Output:
        return output_of(self._seen, self._stats)


def output_of(pieces: Sequence[Piece], stats: Stats) -> Output:
    """What the pieces amount to."""
    return Output("".join(piece.text for piece in pieces), [t for piece in pieces for t in piece.token_ids], stats)
