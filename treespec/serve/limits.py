"""What a server accepts, so that no request takes all of its time or memory."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """prompt: tokens; None is the context. tokens: of an answer. answers: of a request.

    body: bytes of a request. seconds: from the arrival of a request to the end of its answers.
    arrival: seconds in which headers and body must arrive.
    pages: answers on the page at a time; each has a cache of its own.
    """

    body: int = 4 << 20
    prompt: int | None = None
    tokens: int = 4096
    answers: int = 64
    seconds: float = 600.0
    arrival: float = 30.0
    pages: int = 2
