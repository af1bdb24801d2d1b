"""One thread at a time computes with a model.

A forward over a tree changes the model while it runs: drafts by the target itself swap layers, and taps hang hooks on
them. So the lock belongs to the model, whatever wraps it: two `Spec`s over
one model take turns, a cycle each.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_adding = Lock()


@contextmanager
def alone_with(models: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, no other thread computes with these models. It may be entered again by the thread that is inside."""
    with ExitStack() as stack:
        for model in sorted(
            set(models), key=id
        ):  # in one order, so that two threads never wait for each other
            stack.enter_context(_lock_of(model))
        yield


def _lock_of(model: nn.Module) -> Any:
    with _adding:
        return _locks.setdefault(model, RLock())
