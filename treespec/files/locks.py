"""One thread at a time computes with a model, and threads take turns.

A forward over a tree changes the model while it runs: drafts by the target itself swap layers, and
aux hidden states are read by hooks on them. So the lock belongs to the model, whatever wraps it: two
`Spec`s over one model take turns, a cycle each.
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
    """A re-entrant lock that waiting threads get in the order in which they came.

    A thread that computes cycle after cycle releases `threading.RLock` and takes it again before
    any waiting thread wakes up. Here it goes to the end of the line.
    """

    def __init__(self) -> None:
        self._changed = Condition()  # guards the fields below; held for a few statements
        self._line: deque[int] = deque()  # threads, the one inside first
        self._depth = 0  # how often it entered

    def __enter__(self) -> None:
        own = get_ident()
        with self._changed:
            if self._depth and self._line[0] == own:
                self._depth += 1
                return
            self._line.append(own)
            try:
                self._changed.wait_for(lambda: self._line[0] == own)
                self._depth = 1
            except BaseException:  # an interrupt: leave the line
                self._line.remove(own)
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
    """Inside, no other thread computes with these models. The thread inside may enter again."""
    with ExitStack() as stack:
        # All threads lock in one order, so that two never wait for each other.
        for model in sorted(set(models), key=id):
            stack.enter_context(_get_turns(model))
        yield


def _get_turns(model: nn.Module) -> Turns:
    with _adding:
        return _turns.setdefault(model, Turns())
