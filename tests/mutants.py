"""Copies of modules with a line changed: a test that passes for them shows nothing."""

import inspect
from inspect import getattr_static
from textwrap import dedent
from types import ModuleType


def mutant(module, *changes, part=None):
    """A copy of the module with each (old, new) made in its source, where the old occurs once.

    part: make them in a copy of this module instead, from which the copy of `module` then has what it imports.
    """
    source = inspect.getsource(module)
    copy = ModuleType(module.__name__)
    if part and part is not module:
        exec(source, vars(copy))
        changed = vars(mutant(part, *changes))
        imported = [name for name, value in vars(part).items() if vars(copy).get(name) is value]
        vars(copy).update({name: changed[name] for name in imported})
        return copy
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    exec(source, vars(copy))
    return copy


def plant(monkeypatch, owner, name, old, new):
    """Put a fault into a class or module in place: one of its functions with `old`, which occurs once, made `new`."""
    written = getattr_static(owner, name)
    function = written.fget if isinstance(written, property) else written
    source = dedent(inspect.getsource(function))
    assert source.count(old) == 1, old
    scope = dict(function.__globals__)
    exec(source.replace(old, new), scope)
    monkeypatch.setattr(owner, name, scope[name])
