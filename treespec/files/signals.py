"""Ctrl-C and SIGTERM: a block of the program handles both."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def handling_stop_signals(
    handler: Callable[[int, FrameType | None], None],
) -> Iterator[None]:
    """In this block Ctrl-C and SIGTERM call `handler`; a signal that the process ignores, as under nohup, does not.

    Python allows that in the main thread only: in another thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier_handlers = {}
    for number in STOP_SIGNALS:
        earlier_handler = signal.getsignal(number)
        if earlier_handler != signal.SIG_IGN:
            earlier_handlers[number] = earlier_handler
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier_handler in earlier_handlers.items():
            signal.signal(number, earlier_handler)
