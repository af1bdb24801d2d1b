"""Where a command starts and ends: streams that take any text, and one line for whatever goes wrong."""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from treespec.cli.terminal import end_notice
from treespec.text.printable import one_line

if TYPE_CHECKING:
    import typer

TRACEBACK = "--traceback"
INTERRUPTED = 130  # as a shell has it: 128 and the number of the signal


def run(app: "typer.Typer", arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code.

    0: done. 1: a bug, or no memory left. 2: something that was given cannot be used. 130: Ctrl-C. The last resort
    names the error in a line; with --traceback, which may stand anywhere, it raises it. A reader that leaves, as
    `| head` does, and Ctrl-C end a command without a word.
    """
    tolerate_any_text()
    wants_traceback = TRACEBACK in arguments
    try:
        code = app([word for word in arguments if word != TRACEBACK], standalone_mode=False)
        sys.stdout.flush()
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
        return 2 if for_people else 1
    return code if isinstance(code, int) else 0


def tolerate_any_text() -> None:
    """What an output's encoding lacks is written as an escape: no text ends a command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def leave_stdout() -> None:
    """Nobody reads it any more: what Python flushes when it ends goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def in_words(error: Any) -> str:
    """The one line of an error. "" where the command line has printed its help instead."""
    if hasattr(error, "format_message"):  # the parser's own errors
        return " ".join(error.format_message().split())
    if getattr(error, "exit_code", None) == 2:
        return " ".join(str(error).split("\n"))
    if out_of_memory(error):
        return (
            f"no memory is left ({first_line(error)}): close other programs, take a smaller --batch, or a smaller "
            f"--dtype such as bfloat16; {TRACEBACK} shows where"
        )
    return f"{type(error).__name__}: {first_line(error)}. That is a bug: the same command with {TRACEBACK} shows where"


def out_of_memory(error: Exception) -> bool:
    """Of Python, of a device, or of torch on a CPU, which has no type of its own for it."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


def first_line(error: Exception) -> str:
    """Of what it says, shortened; where it says nothing, that."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return line.removesuffix(".") if len(line) <= 300 else line[:300] + "…"
