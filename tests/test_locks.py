"""Threads take turns at a model, in the order in which they came."""

import threading
from contextlib import suppress

from torch import nn

from treespec.files.locks import Turns, alone_with


def test_a_thread_that_waits_gets_the_next_turn_of_one_that_computes_on_and_on():
    """A lock that goes to whoever is awake would let the computing thread enter again and again."""
    model, turns, inside, over = nn.Linear(1, 1), [], threading.Event(), threading.Event()

    def computes():
        while not over.is_set():
            with alone_with([model]):
                turns.append("computes")
                inside.set()

    thread = threading.Thread(target=computes)
    thread.start()
    inside.wait(10)
    for _ in range(20):
        with alone_with([model]), alone_with([model]):  # the thread inside may enter again
            turns.append("waits")
            inside.clear()
        assert inside.wait(10)
    over.set()
    thread.join(10)
    assert not thread.is_alive()


def test_turns_go_by_arrival_after_one_that_ended_with_an_error():
    lock, order, threads = Turns(), [], []

    def entered(number):
        with lock:
            order.append(number)

    with suppress(LookupError), lock:
        for number in range(5):
            threads.append(threading.Thread(target=entered, args=(number,)))
            threads[-1].start()
            while len(lock._line) <= number:
                pass
        raise LookupError
    for thread in threads:
        thread.join(10)
    assert order == list(range(5))
