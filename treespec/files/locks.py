"""Locks by which only one thread at a time computes with a model, and threads take turns.

A forward over a tree changes the model while it runs: drafting by the target itself swaps layers, and hooks on layers
read the aux hidden states. So the lock belongs to the model: two `Spec`s over one model take turns, one cycle each.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Condition, Lock, get_ident
from typing import final
from weakref import WeakKeyDictionary

from torch import nn


@final
class Turns:
    """A fair re-entrant lock: waiting threads get it in the order of their arrival.

    With `threading.RLock`, a thread that computes cycle after cycle would acquire the lock again before a waiting
    thread wakes up. Here it goes to the end of the queue:

        thread 1 runs a cycle     queue: 1 2 3
        it releases the lock      queue: 2 3
        it asks for it again      queue: 2 3 1
    """

    def __init__(self) -> None:
        self._changed = Condition()  # guards the attributes below, for a few statements at a time
        self._line: deque[int] = (
            deque()
        )  # ids of threads: the one that holds the lock, then waiting ones
        self._depth = 0  # number of times the holder has entered

    def __enter__(self) -> None:
        thread = get_ident()
        with self._changed:
            if self._depth and self._line[0] == thread:
                self._depth += 1
                return
            self._line.append(thread)
            try:
                self._changed.wait_for(lambda: self._line[0] == thread)
                self._depth = 1
            except BaseException:  # an interrupt: leave the queue
                self._line.remove(thread)
                self._changed.notify_all()
                raise

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._line.popleft()
                self._changed.notify_all()


_turns: WeakKeyDictionary[nn.Module, Turns] = WeakKeyDictionary()
_adding = Lock()


@contextmanager
def alone_with(models: Sequence[nn.Module]) -> Iterator[None]:
    """In this block no other thread computes with these models. A thread may nest such blocks."""
    with ExitStack() as stack:
        # All threads lock in the same order, so that there is no deadlock.
        for model in sorted(set(models), key=id):
            stack.enter_context(_get_turns(model))
        yield


def _get_turns(model: nn.Module) -> Turns:
    """The lock of a model."""
    with _adding:
        return _turns.setdefault(model, Turns())
