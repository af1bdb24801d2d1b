"""The answer to a request that an engine decodes, for the caller that submitted it."""

import logging
from collections.abc import Callable
from threading import Condition
from typing import final

from treespec.decoding.sequence import Piece, Text
from treespec.decoding.stats import Stats
from treespec.requests.stream import Output, output_of

log = logging.getLogger(__name__)

OnPiece = Callable[[Piece | None], None]


@final
class Answer:
    """An iterator over the pieces as they are accepted, for one consumer; `next` waits for a piece.

    Iteration ends with the answer, or once it is cancelled. An answer that failed raises its error
    on every `next`, so a cut answer never looks complete.
    """

    def __init__(self, text: Text, on_piece: OnPiece | None = None) -> None:
        """on_piece: is called on the engine's thread for each piece, and with None at the end."""
        self._text, self._on_piece = text, on_piece
        self._pieces: list[Piece] = []
        self._read = 0  # pieces that the consumer has got
        self._over = False
        self._changed = Condition()

    def __iter__(self) -> "Answer":
        return self

    def __next__(self) -> Piece:
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._read < len(self._pieces))
            if self._read < len(self._pieces):
                self._read += 1
                return self._pieces[self._read - 1]
        if self.error:
            raise self.error
        raise StopIteration

    def cancel(self) -> None:
        """End the answer, from any thread, without waiting. The present cycle is its last."""
        self._text.cancelled = True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; returns whether it has come. timeout: seconds; None waits for ever."""
        with self._changed:
            return self._changed.wait_for(lambda: self._over, timeout)

    def result(self) -> Output:
        """The whole answer, once it has ended. Raises its error."""
        self.wait()
        if self.error:
            raise self.error
        return self.output

    @property
    def cancelled(self) -> bool:
        return self._text.cancelled

    @property
    def error(self) -> Exception | None:
        """What ended the answer before its time."""
        return self._text.error

    @property
    def stats(self) -> Stats:
        """Counts and seconds of the answer so far."""
        return self._text.stats

    @property
    def output(self) -> Output:
        """The answer so far."""
        with self._changed:
            return output_of(self._pieces, self.stats)

    def take(self, piece: Piece) -> None:
        """For the engine: hand a piece over. A caller that fails at it ends its own answer."""
        with self._changed:
            self._pieces.append(piece)
            self._changed.notify_all()
        if self._on_piece:
            with self._text.failing():
                self._on_piece(piece)

    def end(self) -> None:
        """For the engine: no more pieces come."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        if self._on_piece:
            try:
                self._on_piece(None)
            except Exception:
                log.exception("on_piece failed at the end of an answer")
