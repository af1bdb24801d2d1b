"""What runs inside of the process of `sandbox`: set the limits, run a program, say the word.

Standard input has the word in its first line and the program below. This file imports nothing of
ours, because it runs without any installed package.
"""

import io
import os
import re
import signal
import sys

MEMORY = 1 << 30  # bytes
FILES = 32  # open ones
# Python's audit events, or how they begin, for what else changes files, starts processes or talks.
FORBIDDEN = re.compile(
    r"os\.(remove|rename|mkdir|rmdir|truncate|link|symlink|chmod|chown|utime|chflags|setxattr"
    r"|removexattr|system|exec|fork|posix_spawn|spawn|kill|startfile)"
    r"|(subprocess|shutil|socket|ctypes|pty|winreg|resource|webbrowser)\."
    r"|sqlite3\.connect|signal\.pthread_kill"
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main() -> None:
    """Run the program, and write the word once it has ended without an error."""
    # 1. The word and the program, and a way out that the program does not have.
    word, _, program = sys.stdin.buffer.read().partition(b"\n")
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdin, sys.stdout, sys.stderr = io.StringIO(), Nowhere(), Nowhere()

    # 2. Limits.
    limit(int(sys.argv[1]))
    sys.addaudithook(refuse)
    refuse_processes()

    # 3. The program; `if __name__ == "__main__"` is not meant for it.
    exec(compile(program, "answer.py", "exec"), {"__name__": "answer"})
    os.write(out, word)
    os._exit(0)


class Nowhere(io.TextIOBase):
    """A stream that forgets what is written."""

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        return len(text)


def limit(seconds: int) -> None:
    """Limits of the operating system; Windows has none of these."""
    # 1. Which there are. The alarm ends a sleeping program whose supervisor was killed.
    try:
        import resource
    except ImportError:
        return
    signal.alarm(seconds + 1)
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: MEMORY,
        resource.RLIMIT_DATA: MEMORY,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: FILES,
        resource.RLIMIT_CORE: 0,
    }

    # 2. Lower them, never above what already holds.
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (ValueError, OSError):  # macOS knows no limit on memory
            continue


def refuse(event: str, details: tuple[object, ...]) -> None:
    """An audit hook: raises PermissionError for what the program may not do."""
    if event == "open":
        _, mode, flags = details
        writes = isinstance(mode, str) and bool(set(mode) & set("wax+"))
        if writes or (isinstance(flags, int) and flags & WRITING):
            raise PermissionError("this program may not write files")
    elif FORBIDDEN.match(event):
        raise PermissionError(f"this program may not use {event}")


def refuse_processes() -> None:
    """Take away what `multiprocessing` starts processes by: it raises no audit event."""
    try:
        import _posixsubprocess
    except ImportError:  # Windows
        return

    def fork_exec(*_: object) -> int:
        raise PermissionError("this program may not start processes")

    vars(_posixsubprocess)["fork_exec"] = fork_exec


if __name__ == "__main__":
    main()
