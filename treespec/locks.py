"""One thread at a time computes with a model.

A forward over a tree changes the model while it runs: drafts by the target itself swap layers, and
taps hang hooks on them. So the lock belongs to the model, whatever wraps it: two `Spec`s over one
model take turns, a cycle each.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Lock, RLock
from weakref import WeakKeyDictionary

from torch import nn

_locks: WeakKeyDictionary[nn.Module, AbstractContextManager[bool]] = WeakKeyDictionary()
_adding = Lock()


@contextmanager
def alone_with(models: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, no other thread computes with these models. The thread inside may enter again."""
    with ExitStack() as stack:
        # All threads lock in one order, so that two never wait for each other.
        for model in sorted(set(models), key=id):
            stack.enter_context(_lock_of(model))
        yield


def _lock_of(model: nn.Module) -> AbstractContextManager[bool]:
    with _adding:
        return _locks.setdefault(model, RLock())
