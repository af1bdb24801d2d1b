"""An answer: as a stream of pieces while it is decoded, and as a whole."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from threading import RLock
from typing import final

from treespec.decoding.logprobs import TokenLogprob
from treespec.decoding.sequence import Piece
from treespec.decoding.stats import Stats, figures_of
from treespec.errors import InputError


@dataclass(frozen=True)
class Output:
    """text: without special tokens and stop strings. token_ids: new ones, with end-of-sequence.

    logprobs: of each token, where they were asked for.
    """

    text: str
    token_ids: list[int]
    stats: Stats
    logprobs: list[TokenLogprob] | None = None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Output({figures_of(self.stats)})"


@final
class Stream:
    """An iterator over the pieces of an answer; `output` and `stats` hold the answer so far.

    Decoding starts with the first `next` and stops at `close`, which the end of a `with` block
    calls. A `Spec` decodes one text at a time: once it begins another, this stream raises
    SupersededError. A stream that has failed raises again on every `next`, so a cut answer never
    looks complete. A stream may be dropped without `close`.
    """

    def __init__(self, pieces: Iterator[Piece], stats: Stats) -> None:
        self._pieces, self._stats = pieces, stats
        self._seen: list[Piece] = []
        self._lock = RLock()  # threads may share a stream: one of them gets each piece
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
                self._failed = InputError(
                    f"this stream was interrupted by {type(error).__name__}: begin another"
                )
                raise
            self._seen.append(piece)
            return piece

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop, from any thread, without waiting. A cycle in another thread runs to its end."""
        self._closed = True

    @property
    def stats(self) -> Stats:
        """Counts and seconds of the answer so far."""
        return self._stats

    @property
    def output(self) -> Output:
        """The answer so far."""
        return output_of(self._seen, self._stats)


def output_of(pieces: Sequence[Piece], stats: Stats) -> Output:
    """The pieces as one answer."""
    token_ids = [token for piece in pieces for token in piece.token_ids]
    told = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    logprobs = list(chain.from_iterable(told)) if told else None
    return Output("".join(piece.text for piece in pieces), token_ids, stats, logprobs)
