"""The command line: `treespec --help` lists the commands.

Only names and options are imported here; torch and transformers load inside the command that runs.
"""

import io
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, final

import typer

from treespec.cli import answer, datastore, make, measure
from treespec.cli.chat import chat
from treespec.cli.heads import list_heads
from treespec.cli.terminal import end_notice
from treespec.cli.words import (
    CommandGroup,
    explain_extra_words,
    explain_unknown_command,
    explain_unknown_option,
)
from treespec.errors import get_first_line, is_input_error
from treespec.files.distribution import find_version
from treespec.files.printable import to_one_line
from treespec.files.quiet import NOISY_LOGGERS
from treespec.kernels.allocator import keep_freed_memory

TRACEBACK_FLAG = "--traceback"
INTERRUPTED_EXIT_CODE = 130  # as in shells: 128 plus the signal's number

app = typer.Typer(
    name="treespec",
    help="Lossless tree drafting: train a draft head, chat with it, measure it.",
    cls=CommandGroup,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command()(make.train)  # --help lists them in this order
app.command()(make.regenerate)
app.command()(chat)
app.command("eval")(measure.evaluate)
app.command()(measure.acceptance)
app.command()(answer.generate)
app.command()(answer.trace)
app.command("heads")(list_heads)
app.command()(measure.calibrate)
app.command()(measure.tree)
app.command("skip-search")(measure.skip_search)
app.command()(measure.doctor)
app.command()(measure.certify)
app.command()(measure.tau)
app.command("report")(measure.rebuild_report)
app.command()(answer.serve)
app.command()(make.export)
app.add_typer(datastore.app, name="datastore")
app.command()(answer.quickstart)


def show_version(wanted: bool) -> None:
    """Print the version and exit, if --version is given."""
    if wanted:
        print(f"treespec {find_version()}")
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
        bool, typer.Option(TRACEBACK_FLAG, help="Show the traceback of an error.")
    ] = False,
) -> None:
    """The options that every command has."""


def main() -> None:
    """Run the command line and exit with its code. Every error is one line (`run`)."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    keep_freed_memory()  # only in the command's process: `import treespec` does not change the allocator
    sys.exit(run(app, sys.argv[1:]))


def run(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code.

    Each error is printed as one line; --traceback, anywhere on the line, raises it instead. Ctrl-C and a closed pipe,
    as with `| head`, end a command without a message.

    Returns: 0 for success, 1 for a bug or no memory left, 2 for an input that cannot be used, 130 for Ctrl-C.
    """
    prepare_output()
    words = [word for word in arguments if word != TRACEBACK_FLAG]
    try:
        code = app(words, standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except KeyboardInterrupt:
        end_notice()
        return INTERRUPTED_EXIT_CODE
    except Exception as error:
        if TRACEBACK_FLAG in arguments and find_parser_message(error) is None:
            raise
        print_error(error)
        if is_input_error(error):
            return 2
        return 1
    finally:
        flush_output()


def prepare_output() -> None:
    """Let the standard streams accept any text, and print treespec's warnings, one line each."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a test may replace it
            stream.reconfigure(errors="backslashreplace")  # for characters that the encoding lacks
    for name in NOISY_LOGGERS[1:]:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("treespec").handlers = [WarningLines(logging.WARNING)]


def print_error(error: Exception) -> None:
    """Print the line of an error on standard error."""
    end_notice()
    words = format_error(error)
    if words:
        print(f"treespec: {to_one_line(words)}", file=sys.stderr)


def flush_output() -> None:
    """Flush standard output. If that fails, redirect it to /dev/null, since Python flushes again when it exits."""
    try:
        sys.stdout.flush()
    except OSError:  # a closed pipe, or a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@final
class WarningLines(logging.Handler):
    """Prints treespec's warnings on standard error, one line each, after erasing the notice."""

    def emit(self, record: logging.LogRecord) -> None:
        end_notice()
        print(f"treespec: {to_one_line(record.getMessage())}", file=sys.stderr, flush=True)


def find_parser_message(error: Exception) -> str | None:
    """The message of an error of the command-line parser; None for other errors."""
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return None
    message = str(format_message())
    context: Any = getattr(error, "ctx", None)
    parameter: Any = getattr(error, "param", None)
    if message.startswith("Missing option") and parameter is not None:
        return f"{message.rstrip('.')}: {parameter.help}"
    extra_words = re.match(r"Got unexpected extra argument\(?s?\)? \((.*)\)", message)
    if extra_words is not None and context is not None:
        return explain_extra_words(extra_words[1], context.command.params)
    unknown = re.match(r"No such (option|command):? '?(-*[^\s']*)", message)
    if unknown is None or context is None:
        return message
    kind, name = unknown.groups()
    if kind == "option":
        return explain_unknown_option(name, context.command.params)
    return explain_unknown_command(name, list(context.command.commands))


def format_error(error: Exception) -> str:
    """Format an error as one line; "" for a closed pipe, and if the help is printed instead."""
    message = find_parser_message(error)
    if message is not None:
        return message.replace("\n", " ")
    if is_input_error(error):
        return str(error).replace("\n", " ")
    if isinstance(error, BrokenPipeError):
        return ""
    line = get_first_line(error)
    if isinstance(error, OSError):
        return f"cannot read or write: {line}"
    kind = type(error).__name__
    if re.search(
        "MemoryError|can't allocate memory", f"{kind} {error}"
    ):  # the latter is torch's on a CPU
        return (
            f"no memory is left ({line}): close other programs, take a smaller "
            f"--batch, or a smaller --dtype such as bfloat16; {TRACEBACK_FLAG} shows where"
        )
    return f"{kind}: {line}. That is a bug: the same command with {TRACEBACK_FLAG} shows where"
