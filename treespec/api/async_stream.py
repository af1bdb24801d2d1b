"""Answers of an `Engine` in asyncio: `async for piece in engine.stream(prompt)`."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import final

from treespec.engine.output import Completion, OnPiece, Output
from treespec.engine.request import Piece
from treespec.engine.stats import Stats


@final
class AsyncStream:
    """An asynchronous iterator over the pieces of an answer, for one task.

    Iteration ends with the answer. If the request failed, every `anext` raises its error. The end of an `async with`
    block, or the cancellation of the task that waits, cancels the answer.
    """

    def __init__(self, submit: Callable[[OnPiece], Completion]) -> None:
        """Begin the answer. submit: queues the request, given the function that takes its pieces."""
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._ended = False
        self._completion = submit(self._take)

    @property
    def stats(self) -> Stats:
        """Counts and seconds of the answer so far."""
        return self._completion.stats

    @property
    def output(self) -> Output:
        """The answer so far."""
        return self._completion.output

    def cancel(self) -> None:
        """End the answer, without waiting. A cycle that runs now is its last."""
        self._completion.cancel()

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> Piece:
        piece = None
        if not self._ended:
            try:
                piece = await self._pieces.get()
            except asyncio.CancelledError:
                self.cancel()
                raise
        if piece is not None:
            return piece
        self._ended = True
        if self._completion.error:
            raise self._completion.error
        raise StopAsyncIteration

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def _take(self, piece: Piece | None) -> None:
        """Hand a piece, or None at the end, from the engine's thread to the event loop."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)
