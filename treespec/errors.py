"""Errors meant for people: the command line prints the line and exits with 2, without a traceback."""


class InputError(ValueError):
    """Something the user gave cannot be used. The message says what, where, and what to do instead.

    `heads` and `trees` stand below this package and raise errors of their own; whatever carries
    `exit_code = 2` is treated alike.
    """

    exit_code = 2


def first_line(error: Exception) -> str:
    """Of what it says, or else its name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
