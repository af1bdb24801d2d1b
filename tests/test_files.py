"""Files that survive, whole or not at all and owned by one process; and threads that take turns, in order."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from commands import complains
from torch import nn
from training import end_process

from treespec.files.atomic import (
    check_writable,
    locked,
    read_json,
    remove_leftovers,
    write_json,
    writing,
)
from treespec.files.locks import Turns, alone_with

REMEDY = "make it again"


def test_a_block_that_fails_leaves_the_old_file_alone(tmp_path):
    write_json(tmp_path / "a.json", {"a": 1})
    with suppress(RuntimeError), writing(tmp_path / "a.json") as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert read_json(tmp_path / "a.json", REMEDY) == {"a": 1}
    with suppress(RuntimeError), writing(tmp_path / "folder", folder=True) as unfinished:
        (unfinished / "x").write_text("half")
        raise RuntimeError
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_cannot_be_written_is_an_input_error(tmp_path):
    (tmp_path / "file").write_text("")
    with complains("cannot write"):
        write_json(tmp_path / "file" / "a.json", {})
    with complains("cannot write"), writing(tmp_path / "file" / "folder", folder=True):
        pass
    with complains("cannot write"), locked(tmp_path / "file"):
        pass


def test_what_cannot_be_written_is_told_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file/a.json", "file/b/a.json", ""):
        with complains("cannot write"):
            check_writable(tmp_path / name)
    check_writable(tmp_path / "new" / "folder" / "a.json")
    (tmp_path / f".file.{end_process()}.tmp").write_text("half")
    check_writable(tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"]


def test_a_second_writer_is_told_which_process_writes(tmp_path):
    """flock tells two open files of a process apart, as of two."""
    with locked(tmp_path), complains(f"process {os.getpid()}"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_temporaries_of_processes_that_ended_are_removed(tmp_path):
    dead = end_process()
    (tmp_path / f".a.json.{dead}.tmp").write_text("half")
    (tmp_path / f".store.{dead}.tmp").mkdir()
    (tmp_path / f".store.{dead}.tmp" / "x").write_text("half")
    (tmp_path / f".b.json.{os.getppid()}.tmp").write_text("being written")
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == [f".b.json.{os.getppid()}.tmp"]


def test_threads_write_the_same_file_each_whole(tmp_path):
    """Another thread that deletes leftovers deletes none that is being written."""
    barrier = threading.Barrier(4)

    def write(number):
        with writing(tmp_path / "a.txt", flush=True) as temporary:
            temporary.write_text(f"{number}")
            barrier.wait(10)
            remove_leftovers(tmp_path)
            barrier.wait(10)
            assert temporary.read_text() == f"{number}"
            barrier.wait(10)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert os.listdir(tmp_path) == ["a.txt"]


def test_temporaries_of_other_machines_are_removed_after_a_day(tmp_path):
    """Containers count processes anew: one with this process's id may be writing in the same folder."""
    other = tmp_path / f".a.json.{os.getpid()}.0123abcd.0123abcd.tmp"
    other.write_text("being written, or left")
    remove_leftovers(tmp_path)
    assert other.exists()
    os.utime(other, (0, 0))
    remove_leftovers(tmp_path)
    assert not other.exists()


def test_a_waiting_thread_gets_the_next_turn_of_a_busy_one():
    """A lock that goes to whoever is awake would let the computing thread enter again and again."""
    model = nn.Linear(1, 1)
    turns = []
    inside = threading.Event()
    over = threading.Event()

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
    lock = Turns()
    order = []
    threads = []

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
