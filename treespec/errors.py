"""Errors for people: the command line prints one line, without a traceback, and exits with 2."""


class InputError(ValueError):
    """An input that cannot be used. The message says what, where, and what to do instead.

    `trees` stands below this package and raises errors of its own. The command line treats every
    error with `exit_code = 2` alike.
    """

    exit_code = 2


class SupersededError(InputError):
    """A stream goes on though its `Spec` has begun another text since."""

    def __init__(self) -> None:
        super().__init__(
            "this stream was superseded: its Spec has begun another text since. Finish or close a "
            "stream before the next text begins, or take spec.new() for a second stream"
        )


class Busy(InputError):
    """An engine has no room for another request now; a later one may enter."""


class TooLong(InputError):
    """A prompt that the target's context does not hold."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class. After a colon the next line follows."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = lines or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
