"""An answer: as a stream of pieces while it is decoded, and as a whole."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import final

from treespec.decode import Piece
from treespec.errors import InputError
from treespec.stats import Stats


@dataclass(frozen=True)
class Output:
    """text: without special tokens and stop strings. token_ids: the new ones, the end-of-sequence included."""

    text: str
    token_ids: list[int]
    stats: Stats


@final
class Stream:
    """An iterator over the pieces of an answer; `output` and `stats` tell what there is so far.

    Nothing is decoded before the first piece is asked for, and nothing after `close`, which the end of a `with` block
    calls. A `Spec` decodes one text at a time: a stream that goes on after its Spec has begun another text raises
    SupersededError. One that has failed fails again, and never looks as if its answer had ended. One that is left
    without being closed keeps nothing busy.
    """

    def __init__(self, pieces: Iterator[Piece], stats: Stats) -> None:
        self._pieces, self._stats = pieces, stats
        self._seen: list[Piece] = []
        self._lock = RLock()  # threads may share a stream: each piece goes to one of them
        self._closed = False
        self._failed: InputError | None = None

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Piece:
        with self._lock:
            if self._closed:
                raise StopIteration
            if self._failed:
                raise self._failed
            try:
                piece = next(self._pieces)
            except StopIteration:
                raise
            except InputError as error:
                self._failed = error
                raise
            except BaseException as error:
                self._failed = InputError(f"this stream was interrupted by {type(error).__name__}: begin another")
                raise
            self._seen.append(piece)
            return piece

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End here. At once, from any thread: a cycle that runs elsewhere ends by itself."""
        self._closed = True

    @property
    def stats(self) -> Stats:
        """What the answer has cost so far."""
        return self._stats

    @property
    def output(self) -> Output:
        return output_of(self._seen, self._stats)


def output_of(pieces: Sequence[Piece], stats: Stats) -> Output:
    """What the pieces amount to."""
    return Output("".join(piece.text for piece in pieces), [t for piece in pieces for t in piece.token_ids], stats)
