"""Text input to a command, and passing notices on a terminal."""

import sys

from treespec.errors import InputError
from treespec.text.strings import one_line


def standard_input() -> str:
    """All of standard input as UTF-8, whatever the locale. Raises InputError where it is not."""
    raw = getattr(sys.stdin, "buffer", None)
    if raw is None:
        return sys.stdin.read()
    try:
        return raw.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise InputError(f"standard input is not UTF-8 text: {where}") from None


class Notice:
    """shown: whether a notice stands on the terminal."""

    shown = False


def notice(text: str) -> None:
    """Show a line on a terminal until `end_notice`. A pipe gets nothing."""
    if sys.stderr.isatty():
        end_notice()
        print(one_line(text), end="", file=sys.stderr, flush=True)
        Notice.shown = True


def end_notice() -> None:
    """Erase the notice, so that the next output begins a line."""
    if Notice.shown:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
        Notice.shown = False
