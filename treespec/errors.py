"""Errors about input that cannot be used: the command line prints them in one line and exits with code 2."""

from collections.abc import Iterable
from difflib import get_close_matches

MIN_SIMILARITY = 0.7  # of a name that an error suggests, by difflib's ratio


class InputError(ValueError):
    """An input that cannot be used. The message says what is wrong, in which file or option, and what to do.

    A tree that cannot be built raises a class of its own, `TreeError` of `trees`. The command line treats all errors
    with `exit_code = 2` alike.
    """

    exit_code = 2


class SupersededError(InputError):
    """A stream was continued after its `Spec` had begun another text."""

    def __init__(self) -> None:
        super().__init__(
            "this stream was superseded: its Spec has begun another text since. Finish or close a "
            "stream before the next text begins, or take spec.new() for a second stream"
        )


class Busy(InputError):
    """The engine's queue is full; a later request may succeed."""


class Unavailable(InputError):
    """What the system refuses for now, such as a new process; a later request may succeed."""


class TooLong(InputError):
    """A prompt that is longer than the target's context."""


def find_similar_name(name: str, names: Iterable[str]) -> str | None:
    """Find the name that is most similar to a mistyped one; None if none is similar enough to be meant."""
    similar_names = get_close_matches(name, list(names), n=1, cutoff=MIN_SIMILARITY)
    if not similar_names:
        return None
    return similar_names[0]


def is_input_error(error: BaseException) -> bool:
    """Whether an error is about an unusable input: `InputError`, `TreeError`, or the command-line parser's error."""
    return getattr(error, "exit_code", None) == InputError.exit_code


def describe_os_error(error: OSError) -> str:
    """Describe why a file or an address cannot be used, without naming it: `No space left on device`."""
    return error.strerror or str(error)


def get_first_line(error: BaseException) -> str:
    """The first line of an error's message, with the next line if it ends with a colon; the class if it is empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if lines[0].endswith(":"):
        return " ".join(lines[:2])
    return lines[0]
