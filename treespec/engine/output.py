"""An answer: a stream of pieces while it is decoded, and the output at its end."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Condition, Event, RLock
from typing import Any, final

from treespec.engine.request import Piece, Request, TokenLogprob
from treespec.engine.stats import Stats, format_stats
from treespec.errors import InputError


@dataclass(frozen=True)
class Output:
    """An answer.

    Attributes:
        text: Without special tokens and without the stop string.
        token_ids: The new tokens, with the end-of-sequence token.
        stats: Counts and seconds.
        logprobs: Of each token; None if the request did not ask for them.
    """

    text: str
    token_ids: list[int]
    stats: Stats
    logprobs: list[TokenLogprob] | None = None

    def __str__(self) -> str:
        return self.text

    def to_json(self) -> dict[str, Any]:
        """The answer as fields for JSON; log-probabilities are left out."""
        finish_reason = "stop"
        if self.stats.truncated:
            finish_reason = "length"
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": finish_reason,
            "stats": self.stats.to_json(),
        }

    def __repr__(self) -> str:
        return f"Output({format_stats(self.stats)})"


@final
class Stream:
    """An iterator over the pieces of an answer; `output` and `stats` hold the answer so far.

    Decoding starts with the first `next` and stops at `close`, which the end of a `with` block
    calls. A `Spec` decodes one request at a time: once it begins another, this stream raises
    SupersededError. A stream that has failed raises its error on every `next`, so that a cut answer
    never looks complete. A stream may be dropped without `close`.
    """

    def __init__(self, pieces: Iterator[Piece], stats: Stats) -> None:
        """stats: counts and seconds of the answer so far."""
        self._pieces = pieces
        self.stats = stats
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
                self._seen.append(next(self._pieces))
            except StopIteration:
                raise
            except InputError as error:
                self._failed = error
                raise
            except BaseException as error:
                message = f"this stream was interrupted by {type(error).__name__}: begin another"
                self._failed = InputError(message)
                raise
            return self._seen[-1]

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop, from any thread, without waiting. A cycle that runs in another thread is completed."""
        self._closed = True

    @property
    def output(self) -> Output:
        """The answer so far."""
        return join_pieces(self._seen, self.stats)


def join_pieces(pieces: Sequence[Piece], stats: Stats) -> Output:
    """Join the pieces of one answer."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    for piece in pieces:
        token_ids += piece.token_ids
        if piece.logprobs is not None:
            if logprobs is None:
                logprobs = []
            logprobs += piece.logprobs
    return Output("".join(piece.text for piece in pieces), token_ids, stats, logprobs)


log = logging.getLogger(__name__)

OnPiece = Callable[[Piece | None], None]


@final
class Completion:
    """The answer to a request that an `Engine` decodes: an iterator over its pieces, for one consumer.

    `next` waits for a piece. Iteration ends when the answer ends or is cancelled. If the request failed,
    every `next` raises its error, so that a cut answer never looks complete.
    """

    def __init__(self, request: Request, on_piece: OnPiece | None = None) -> None:
        """on_piece: called on the engine's thread with each piece, and with None at the end."""
        self._request = request
        self._on_piece = on_piece
        self.stats = request.stats  # counts and seconds of the answer so far
        self._pieces: list[Piece] = []
        self._read = 0  # pieces that the consumer has got
        self._changed = Condition()
        self._ended = Event()

    def __iter__(self) -> "Completion":
        return self

    def __next__(self) -> Piece:
        with self._changed:
            self._changed.wait_for(lambda: self._ended.is_set() or self._read < len(self._pieces))
            if self._read < len(self._pieces):
                self._read += 1
                return self._pieces[self._read - 1]
        if self.error:
            raise self.error
        raise StopIteration

    def cancel(self) -> None:
        """End the answer, from any thread, without waiting. A cycle that runs now is its last."""
        self._request.cancelled = True

    def result(self) -> Output:
        """Wait for the end, and return the answer. Raises its error."""
        self._ended.wait()  # not `_changed`: a wake-up at each piece would slow the engine's thread
        if self.error:
            raise self.error
        return self.output

    @property
    def cancelled(self) -> bool:
        return self._request.cancelled

    @property
    def error(self) -> Exception | None:
        """The error that ended the answer early; None if there is none."""
        return self._request.error

    @property
    def output(self) -> Output:
        """The answer so far."""
        with self._changed:
            return join_pieces(self._pieces, self.stats)

    def take(self, piece: Piece) -> None:
        """For the engine: hand a piece over. If `on_piece` raises, only this answer ends."""
        with self._changed:
            self._pieces.append(piece)
            self._changed.notify_all()
        if self._on_piece:
            with self._request.failing():
                self._on_piece(piece)

    def end(self) -> None:
        """For the engine: no more pieces come."""
        with self._changed:
            self._ended.set()
            self._changed.notify_all()
        if self._on_piece:
            try:
                self._on_piece(None)
            except Exception:
                log.exception("on_piece failed at the end of an answer")
