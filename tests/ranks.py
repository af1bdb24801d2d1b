"""Two processes that share their work, as `torchrun` starts them; `accelerate launch` tells them more."""

import os
import runpy
import socket
import sys
from contextlib import redirect_stdout
from multiprocessing import get_context
from pathlib import Path

FORKED = get_context("forkserver")  # it imports these once, and has no threads
FORKED.set_forkserver_preload(["treespec.train.run", "treespec.eval.benchmark"])


def rank(number, port, words, said):
    """Run `python -m WORDS` as one of two, with its standard output in a file."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    os.environ |= {"WORLD_SIZE": "2", "RANK": f"{number}", "LOCAL_RANK": f"{number}"}
    sys.argv[:] = words
    with said.open("w") as out, redirect_stdout(out):
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def by_two(line, folder):
    """What each of two processes prints that run `python -m LINE`. folder: for what they print."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = [Path(folder) / f"said-{number}" for number in (0, 1)]
    words = line.split()
    ranks = []
    for number, file in enumerate(files):
        ranks.append(FORKED.Process(target=rank, args=(number, port, words, file), daemon=True))
        ranks[-1].start()
    for one in ranks:
        one.join(120)
    assert [one.exitcode for one in ranks] == [0, 0]
    return [file.read_text() for file in files]
