"""Read standard input; print notices, progress and results.

Progress goes to standard error: a bar on a terminal, plain lines elsewhere.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from signal import default_int_handler
from typing import TYPE_CHECKING, TypeVar

from treespec.errors import InputError
from treespec.files.printable import to_one_line
from treespec.files.signals import handling_stop_signals

if TYPE_CHECKING:
    from rich.console import Console

    from treespec.eval.common import ProgressStep
    from treespec.eval.header import RunHeader
    from treespec.eval.report import EvalReport

Config = TypeVar("Config")
Result = TypeVar("Result")


def read_standard_input() -> str:
    """Read all of standard input as UTF-8, whatever the locale. Raises InputError if it is not UTF-8."""
    if not isinstance(sys.stdin, TextIOWrapper):  # a program that runs the command may replace it
        return sys.stdin.read()
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise InputError(f"standard input is not UTF-8 text: {where}") from None


class Notice:
    """The state of the notice line. shown: whether the terminal shows a notice."""

    shown = False


def show_notice(text: str) -> None:
    """Show a line on a terminal until `end_notice` erases it. A pipe gets nothing."""
    if sys.stderr.isatty():
        end_notice()
        print(to_one_line(text), end="", file=sys.stderr, flush=True)
        Notice.shown = True


def end_notice() -> None:
    """Erase the notice, so that the next output begins on an empty line."""
    if Notice.shown:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
        Notice.shown = False


@contextmanager
def resumes(out: str, describe: Callable[[], str] | None = None) -> Iterator[None]:
    """In this block Ctrl-C and SIGTERM print what the same command will do, and raise KeyboardInterrupt.

    Of several processes only the first one prints.

    Args:
        out: the folder with the run's results.
        describe: returns the sentence. Default: None, that the same command resumes from `out`.
    """
    try:
        with handling_stop_signals(default_int_handler):
            yield
    except KeyboardInterrupt:
        end_notice()
        sentence = f"The same command resumes from {out}"
        if describe is not None:
            sentence = describe()
        if os.environ.get("RANK", "0") == "0":
            print(f"\nStopped. {sentence}", file=sys.stderr)
        raise


def run_with_progress(
    work: Callable[[Config, Callable[["ProgressStep"], None]], Result],
    config: Config,
    console: "Console | None" = None,
) -> Result:
    """Run `work(config, report)`, show each step that it reports, and return its result.

    A terminal shows one line, with a bar and the present step; a pipe gets a line per step.

    Args:
        work: the function to run; it calls `report` with each `ProgressStep`.
        config: the first argument of `work`.
        console: where to show progress. Default: None, standard error.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    end_notice()
    if console is None:
        console = Console(stderr=True)
    if not console.is_terminal:
        return work(
            config, lambda step: print_remark(f"{step.done}/{step.total} {to_one_line(step.text)}")
        )
    progress = Progress(
        BarColumn(20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
    )
    with progress as bar:
        task = bar.add_task("", total=None)

        def report(step: "ProgressStep") -> None:
            text = to_one_line(step.text)
            bar.update(task, completed=step.done, total=step.total, description=text)

        return work(config, report)


def show_result(report: "EvalReport", header: "RunHeader | None" = None) -> None:
    """Print a report, with what was measured, as Markdown; on a terminal its tables fit the width."""
    from shutil import get_terminal_size

    from treespec.eval.report import render_markdown

    width = None
    if sys.stdout.isatty():
        width = get_terminal_size().columns
    print(render_markdown(report, width, header), end="")


def print_remark(*lines: str) -> None:
    """Print lines on standard error, so that a pipe receives only results."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def build_prompt_reader(words: Sequence[str]) -> Callable[[], str]:
    """Build the function that reads a line, with completion, Alt-Enter for line breaks, and a history file.

    words: what is completed at the beginning of a line.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    # 1. Open the history, which only the user may read. If it cannot be written, it lasts for this process.
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    file = state / "treespec" / "history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(0o600)
        file.open("ab").close()
        history: FileHistory | InMemoryHistory = FileHistory(str(file))
    except OSError:
        history = InMemoryHistory()

    # 2. Bind the keys.
    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    session: PromptSession[str] = PromptSession(
        "> ",
        history=history,
        key_bindings=keys,
        completer=WordCompleter(list(words), sentence=True),
        prompt_continuation="  ",
    )
    return session.prompt
