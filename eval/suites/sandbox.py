"""Run a program that a model wrote, in a process of its own with limits.

This guards against accidents, as the standard library can: endless loops, full memories and disks,
deleted files. It is no sandbox against malice; give code of a model that you do not trust a
container or a virtual machine of its own.
"""

import os
import secrets
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from treespec.errors import InputError

SECONDS = 10.0  # for one program
INSIDE = Path(__file__).with_name("inside.py")
# Of the environment, which may hold keys. A Python outside the system's folders may need the paths.
KEPT = ("SYSTEMROOT", "TMPDIR", "TEMP", "TMP", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


def runs(program: str, seconds: float = SECONDS) -> bool:
    """Whether a program ends without an error within `seconds`.

    The program may not fork, connect, write files or use more than 1 GiB of memory, and has the
    standard library alone. Windows has no limits on memory and processor time.
    """
    # 1. A word that only the supervisor in the process can say: `exit(0)` is no success.
    word = secrets.token_hex()
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(INSIDE), str(int(seconds))]

    # 2. The process, killed with its whole group when its time is over.
    with (
        TemporaryDirectory(prefix="treespec-", ignore_cleanup_errors=True) as folder,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            start_new_session=True,
        ) as process,
    ):
        try:
            said, _ = process.communicate(f"{word}\n{program}".encode(errors="replace"), seconds)
        except subprocess.TimeoutExpired:
            kill(process)
            said = b""
        except BaseException:  # Ctrl-C
            kill(process)
            raise
    return said == word.encode()


@cache
def check_works() -> None:
    """Raises InputError where no program can run: every answer would count as wrong."""
    if not runs(""):
        raise InputError(
            f"--run-code: an empty program does not end well within {SECONDS:.0f} s: does "
            f"`{sys.executable} -I -S` start?"
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a running process and those that it started."""
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
