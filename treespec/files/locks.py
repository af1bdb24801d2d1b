"""One thread at a time computes with a model, and threads take turns.

A forward over a tree changes the model while it runs: drafts by the target itself swap layers, and
taps hang hooks on them. So the lock belongs to the model, whatever wraps it: two `Spec`s over one
model take turns, a cycle each.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Lock, get_ident
from typing import final
from weakref import WeakKeyDictionary

from torch import nn


@final
class Turns:
    """A re-entrant lock that waiting threads get in the order in which they came.

    A thread that computes cycle after cycle releases `threading.RLock` and takes it again before
    any waiting thread wakes up. This lock goes from hand to hand instead.
    """

    def __init__(self) -> None:
        self._guard = Lock()  # of the fields below; held for a few statements
        self._owner, self._depth = 0, 0  # the thread inside (0: none), and how often it entered
        self._line: deque[tuple[int, Lock]] = deque()  # waiting threads, and a gate for each

    def __enter__(self) -> None:
        own, gate = get_ident(), Lock()
        before, inside = self._owner == own, False
        try:
            # 1. Enter if nobody is inside, or this thread is.
            with self._guard:
                if before or not self._owner:
                    self._owner = own
                    self._depth += 1
                    inside = True
                else:
                    gate.acquire()
                    self._line.append((own, gate))

            # 2. Else wait until the thread inside opens the gate.
            if not inside:
                gate.acquire()
        except BaseException:  # an interrupt: leave the line, or pass the turn on
            with self._guard:
                if (own, gate) in self._line:
                    self._line.remove((own, gate))
            if inside or (self._owner == own and not before):
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with self._guard:
            self._depth -= 1
            if self._depth:
                return
            if self._line:
                self._owner, gate = self._line.popleft()
                self._depth = 1
                gate.release()
            else:
                self._owner = 0


_turns: WeakKeyDictionary[nn.Module, Turns] = WeakKeyDictionary()
_adding = Lock()


@contextmanager
def alone_with(models: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, no other thread computes with these models. The thread inside may enter again."""
    with ExitStack() as stack:
        # All threads lock in one order, so that two never wait for each other.
        for model in sorted(set(models), key=id):
            stack.enter_context(_turns_of(model))
        yield


def _turns_of(model: nn.Module) -> Turns:
    with _adding:
        return _turns.setdefault(model, Turns())
