"""A KeyboardInterrupt at any line of the cache leaves texts as they were, as they become, or a cache without texts."""

import sys
from collections.abc import Callable
from contextlib import contextmanager
from operator import sub
from typing import Any

import pytest
import torch
from commands import interrupt_call
from models import random_head, target

from treespec.api.spec import Spec
from treespec.draft.tree_drafter import TreeDrafter
from treespec.model import cache as module
from treespec.model import cache_layer as tree_layer
from treespec.model.cache import TreeCache
from treespec.model.cache_layer import TreeLayer
from treespec.model.cache_rows import find_first_seen
from treespec.model.target import Target

PROMPTS = [[5, 9, 4, 30, 11], [7, 33], [20, 21, 3, 44, 17, 60], [8, 8, 12]]


@contextmanager
def interrupted_at(line):
    """Raise KeyboardInterrupt at that line of those that are run of cache.py."""
    left = line

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename not in (module.__file__, tree_layer.__file__):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def texts(lengths, first=0):
    """Two layers that hold text t as 100 t + number, room for two nodes more; one has a window."""
    caches = []
    for text, length in enumerate(lengths, start=first):
        one = TreeCache(2, 4, None, [None, 2], slack=2)
        for layer in range(2):
            states = (100 * text + torch.arange(1.0, length + 1))[None, None, :, None]
            one.update(states, -states, layer)
        one.rewind([length])
        caches.append(one)
    if caches[1:]:
        caches[0].join(caches[1:])
    return caches[0]


def held(cache):
    """Of each layer whether forwards write behind the longest text, and what they may see of each."""
    found: list[Any] = []
    for layer in cache.tree_layers:
        keys, values = layer.storage
        assert keys.shape == values.shape
        assert keys.shape[2] == layer.capacity
        for states in (keys, -values):
            ends = [*map(sub, cache.lengths, cache.list_first_positions(layer.window))]
            rows = [
                row[0, find_first_seen(n, layer.window) : n, 0].tolist() for row, n in zip(states, ends, strict=True)
            ]
            found.append((layer.length == max(ends), rows))
    return found


def grown(cache):
    """A forward of more nodes than there is room for. Each text keeps the last two of them."""
    states = torch.arange(50.0, 59.0)[None, None, :, None].repeat(len(cache.lengths), 1, 1, 1)
    for layer in range(2):
        cache.update(states, -states, layer)
    cache.commit([[7, 8]] * len(cache.lengths))


CHANGES: dict[str, Callable[[TreeCache], None]] = {
    "join": lambda cache: cache.join([texts([5], first=4), texts([2, 1], first=5)]),
    "select": lambda cache: cache.select([2, 0]),
    "put": lambda cache: cache.put(1, texts([5], first=4)),
    "reserve": lambda cache: cache.reserve(30),
    "forward and commit": grown,
}


def test_as_texts_leave_and_enter_the_others_stay_in_their_memory():
    """The last text fills the row that is free; the next one finds room in the block."""
    cache = texts([3, 1, 2, 2])
    memory = [states.data_ptr() for layer in cache.tree_layers for states in layer.storage]
    cache.select([0, 3, 2])
    cache.join([texts([4, 3], first=6)], row=1)
    assert [states.data_ptr() for layer in cache.tree_layers for states in layer.storage] == memory
    assert cache.lengths == [3, 2, 2, 3]
    (_, rows), (_, windowed) = held(cache)[::2]
    assert rows == [[1, 2, 3], [301, 302], [201, 202], [701, 702, 703]]
    assert windowed == [row[-1:] for row in rows]


@pytest.mark.parametrize("name", CHANGES)
def test_an_interrupt_at_any_line_of_a_change_is_seen_or_harmless(name):
    """`rewind` to the lengths it tells makes a cache whole again, as the next prompt does."""
    change = CHANGES[name]
    before = held(texts([3, 1, 2]))
    after = texts([3, 1, 2])
    change(after)
    outcomes = set()
    line = 0
    done = False
    while not done:
        cache = texts([3, 1, 2])
        try:
            with interrupted_at(line):
                change(cache)
            done = True
        except KeyboardInterrupt:
            line += 1
        if cache.lengths:
            cache.rewind(cache.lengths)
            assert held(cache) in (before, held(after))
            grown(cache)
        outcomes.add(len(cache.lengths))
    assert line > 10
    assert outcomes <= {0, 3, len(after.lengths)}


INTERRUPTED = [
    *((TreeLayer, name) for name in ("gather", "put")),
    *((TreeCache, name) for name in ("join", "select", "commit")),
    *((Target, name) for name in ("prefill", "forward_trees")),
    (TreeDrafter, "observe"),
]
CALLS = [  # the first and a later one, by turns
    pytest.param(
        owner, call, marks=[pytest.mark.slow] * (number % 2 != turn), id=f"{owner[0].__name__}.{owner[1]}-{call}"
    )
    for number, owner in enumerate(INTERRUPTED)
    for turn, call in enumerate((1, 4))
]


@pytest.mark.parametrize("owner, call", CALLS)
def test_an_interrupt_amid_a_batch_leaves_the_object_usable(monkeypatch, owner, call):
    """As texts enter and leave a batch."""
    spec = Spec(target("llama"), random_head(target("llama")), "2x2")
    wanted = [spec.generate(prompt, max_new_tokens=5).token_ids for prompt in PROMPTS]
    with monkeypatch.context() as patch:
        patch.setattr(*owner, interrupt_call(getattr(*owner), call))
        with pytest.raises(KeyboardInterrupt):
            spec.generate(PROMPTS, max_new_tokens=5, batch=2)
    assert [spec.generate(prompt, max_new_tokens=5).token_ids for prompt in PROMPTS] == wanted
    assert [output.token_ids for output in spec.generate(PROMPTS, max_new_tokens=5, batch=2)] == wanted
