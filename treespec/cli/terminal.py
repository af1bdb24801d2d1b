"""Texts on their way into a command, and lines that pass on a terminal."""

import sys

from treespec.errors import InputError
from treespec.text.printable import one_line


def readable(text: str, name: str) -> str:
    """A text that was given on the command line, as UTF-8 whatever the locale. Raises InputError where it is none.

    Python keeps bytes that its locale does not know as lone surrogates: under LC_ALL=C those of an é.
    """
    try:
        return text.encode(errors="surrogateescape").decode()
    except UnicodeError:
        raise InputError(f"{name} is not UTF-8 text: {text.encode(errors='backslashreplace').decode()[:60]}") from None


def standard_input() -> str:
    """All of it, which is UTF-8 whatever the locale. Raises InputError where it is not."""
    raw = getattr(sys.stdin, "buffer", None)
    if raw is None:
        return sys.stdin.read()
    try:
        return raw.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise InputError(f"standard input is not UTF-8 text: {where}") from None


class Notice:
    """Whether a passing line stands on the terminal."""

    shown = False


def notice(text: str) -> None:
    """Show a passing line on the terminal that standard error is, until `end_notice`. Through a pipe nothing."""
    if sys.stderr.isatty():
        end_notice()
        print(one_line(text), end="", file=sys.stderr, flush=True)
        Notice.shown = True


def end_notice() -> None:
    """Take it away, so that what follows begins a line."""
    if Notice.shown:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
        Notice.shown = False
