"""Long work on a thread calls `pause` between its pieces: there it may be ended, or wait for others.

thread of request A    piece 1 | pause: B waits, let it go first | piece 2 | pause: A's client has left: an error
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_on_pause: ContextVar[Callable[[], None] | None] = ContextVar("on_pause", default=None)


def pause() -> None:
    """Let whoever asked for this work end it by an error, or hold it up. Does nothing without `pausing`."""
    on_pause = _on_pause.get()
    if on_pause is not None:
        on_pause()


@contextmanager
def pausing(on_pause: Callable[[], None]) -> Iterator[None]:
    """In this block, on this thread, `pause` calls `on_pause`, which may wait, or raise to end the work."""
    token = _on_pause.set(on_pause)
    try:
        yield
    finally:
        _on_pause.reset(token)
