"""Errors meant for people: the command line prints the line and exits with 2, without a traceback."""


class InputError(ValueError):
    """Something the user gave cannot be used. The message says what, where, and what to do instead.

    `heads` and `trees` stand below this package and raise errors of their own; whatever carries
    `exit_code = 2` is treated alike.
    """

    exit_code = 2


class SupersededError(InputError):
    """A stream goes on though its `Spec` has begun another text since."""

    def __init__(self) -> None:
        super().__init__(
            "this stream was superseded: its Spec has begun another text since. Finish or close a stream before the "
            "next text begins, or take spec.new() for a second stream"
        )


def first_line(error: BaseException) -> str:
    """Of what it says, or else its name. A line that ends with a colon says what only with the next one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
