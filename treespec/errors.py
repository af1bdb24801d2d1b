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


def is_input_error(error: BaseException) -> bool:
    """Whether an error is about an input that cannot be used: ours, that of `trees`, or the parser's."""
    return getattr(error, "exit_code", None) == InputError.exit_code


def describe_os_error(error: OSError) -> str:
    """Why a file or an address cannot be used, without its name: `No space left on device`."""
    return error.strerror or str(error)


def get_first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class. After a colon the next line follows."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if lines[0].endswith(":"):
        return " ".join(lines[:2])
    return lines[0]
