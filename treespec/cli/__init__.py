"""The command line: `treespec --help` lists the commands.

Only names and options are imported here; torch and transformers load inside the command that runs.
"""

import importlib.metadata
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, final

import typer

from treespec.cli import answer, make, measure
from treespec.cli.chat import chat
from treespec.cli.terminal import end_notice
from treespec.errors import first_line
from treespec.files.printable import one_line
from treespec.files.quiet import LOUD
from treespec.kernels.allocator import keep_freed_memory

TRACEBACK = "--traceback"
INTERRUPTED = 130  # as in shells: 128 plus the signal's number

app = typer.Typer(
    name="treespec",
    help="Lossless tree drafting: train a draft head, chat with it, measure it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
for command in (
    *(make.train, make.regenerate, chat, measure.evaluate, measure.acceptance, answer.generate),
    *(
        answer.trace,
        measure.calibrate,
        measure.tree,
        measure.doctor,
        measure.certify,
        measure.tau,
        answer.serve,
    ),
    *(make.export, answer.quickstart),
):
    app.command("eval" if command is measure.evaluate else None)(command)


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"treespec {importlib.metadata.version('treespec')}")
        raise typer.Exit


@app.callback()
def treespec(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=show_version
        ),
    ] = False,
    traceback: Annotated[
        bool, typer.Option(TRACEBACK, help="Show the traceback of an error.")
    ] = False,
) -> None:
    """The options that every command has."""


def main() -> None:
    """Run the command line and exit with its code. Every error is one line (`run`)."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    keep_freed_memory()  # in our own process only: `import treespec` leaves the allocator alone
    sys.exit(run(app, sys.argv[1:]))


def run(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code.

    0: done. 1: a bug, or no memory left. 2: an input that cannot be used. 130: Ctrl-C. Each error
    is one line; --traceback, anywhere on the line, raises it instead. Ctrl-C and a reader that
    leaves, such as `| head`, end a command without a message.
    """
    # 1. Streams take any text: characters that an encoding lacks become escapes.
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    for name in LOUD[1:]:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("treespec").handlers = [WarningLines(logging.WARNING)]

    # 2. Run, and say in a line what ends a command early.
    try:
        code = app([word for word in arguments if word != TRACEBACK], standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except KeyboardInterrupt:
        end_notice()
        return INTERRUPTED
    except Exception as error:
        if TRACEBACK in arguments and not hasattr(error, "format_message"):
            raise
        end_notice()
        words = in_words(error)
        if words:
            print(f"treespec: {one_line(words)}", file=sys.stderr)
        return 2 if getattr(error, "exit_code", None) == 2 else 1
    finally:
        try:
            sys.stdout.flush()
        except (
            OSError
        ):  # a reader that left, or a full disk: what Python flushes at its end goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@final
class WarningLines(logging.Handler):
    """What the library has to tell, each a line on standard error; a notice makes room for it."""

    def emit(self, record: logging.LogRecord) -> None:
        end_notice()
        print(f"treespec: {one_line(record.getMessage())}", file=sys.stderr, flush=True)


def in_words(error: Exception) -> str:
    """The one line of an error. "" for a reader that left, and where the help is printed instead."""
    if hasattr(error, "exit_code"):  # ours, and the parser's own
        said = getattr(error, "format_message", error.__str__)().replace("\n", " ")
        return said + ": values follow options, see --help" * said.startswith("Got unexpected")
    line = first_line(error)
    kind = type(error).__name__
    if isinstance(error, OSError):
        return "" if isinstance(error, BrokenPipeError) else f"cannot read or write: {line}"
    if re.search("MemoryError|can't allocate memory", f"{kind} {error}"):  # torch's on a CPU
        return (
            f"no memory is left ({line}): close other programs, take a smaller "
            f"--batch, or a smaller --dtype such as bfloat16; {TRACEBACK} shows where"
        )
    return f"{kind}: {line}. That is a bug: the same command with {TRACEBACK} shows where"
