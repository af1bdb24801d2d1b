"""The start and end of every command: safe output streams, and one line for any error."""

import errno
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from treespec.cli.terminal import end_notice
from treespec.errors import InputError, first_line
from treespec.files.quiet import LOUD
from treespec.text.strings import one_line

if TYPE_CHECKING:
    import typer

TRACEBACK = "--traceback"
INTERRUPTED = 130  # as in shells: 128 plus the signal's number


def run(app: "typer.Typer", arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code.

    0: done. 1: a bug, or no memory left. 2: an input that cannot be used. 130: Ctrl-C. Each error
    is one line; --traceback, anywhere on the line, raises it instead. Ctrl-C and a reader that
    leaves, such as `| head`, end a command without a message.
    """
    # 1. Run.
    tolerate_any_text()
    show_warnings()
    wants_traceback = TRACEBACK in arguments
    try:
        check_threads()
        code = app([word for word in arguments if word != TRACEBACK], standalone_mode=False)
        sys.stdout.flush()

    # 2. What ends a command early, in a line.
    except BrokenPipeError:
        leave_stdout()
        return 1
    except KeyboardInterrupt:
        end_notice()
        return INTERRUPTED
    except Exception as error:
        for_people = getattr(error, "exit_code", None) == 2
        if wants_traceback and not hasattr(error, "format_message"):
            raise
        end_notice()
        if words := in_words(error):
            print(f"treespec: {one_line(words)}", file=sys.stderr)
        if is_full(error):
            leave_stdout()
        return 2 if for_people else 1
    return code if isinstance(code, int) else 0


def tolerate_any_text() -> None:
    """Write characters that the output's encoding lacks as escapes, so that no text is an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


@final
class WarningLines(logging.Handler):
    """What the library has to tell, each a line on standard error; a notice makes room for it."""

    def emit(self, record: logging.LogRecord) -> None:
        end_notice()
        print(f"treespec: {one_line(record.getMessage())}", file=sys.stderr, flush=True)


def show_warnings() -> None:
    """Show warnings of the library, such as of a dtype that is not the checkpoint's."""
    for name in LOUD[1:]:
        logging.getLogger(name).setLevel(logging.ERROR)
    log = logging.getLogger("treespec")
    if not any(isinstance(handler, WarningLines) for handler in log.handlers):
        log.addHandler(WarningLines(logging.WARNING))


def leave_stdout() -> None:
    """Send what Python flushes at its end to nowhere: nobody reads standard output any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def in_words(error: Exception) -> str:
    """The one line of an error. "" where the command line has printed its help instead."""
    if parser_line := getattr(error, "format_message", None):  # the parser's own errors
        return " ".join(parser_line().split())
    if getattr(error, "exit_code", None) == 2:
        return " ".join(str(error).split("\n"))
    if is_full(error):
        return "cannot write: standard output, or the disk, has no space left"
    if out_of_memory(error):
        return (
            f"no memory is left ({first_line(error)}): close other programs, take a smaller "
            f"--batch, or a smaller --dtype such as bfloat16; {TRACEBACK} shows where"
        )
    message = f"{type(error).__name__}: {first_line(error)}"
    return f"{message}. That is a bug: the same command with {TRACEBACK} shows where"


def is_full(error: Exception) -> bool:
    """Whether the place of a file or of standard output is full."""
    return isinstance(error, OSError) and error.errno == errno.ENOSPC


def check_threads() -> None:
    """Raises InputError for an OMP_NUM_THREADS that OpenMP would complain of on a line of its own."""
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    if not re.fullmatch(r"\s*[1-9]\d*(\s*,\s*[1-9]\d*)*\s*", threads):
        raise InputError(
            f"the environment's OMP_NUM_THREADS is {threads!r}, must be a whole number from 1: set "
            "it again, or unset it"
        )


def out_of_memory(error: Exception) -> bool:
    """Whether Python, a device or torch on a CPU, which has no error type for it, lacks memory."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )
