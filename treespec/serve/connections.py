"""Connections: how many there may be, and how long each may take."""

import asyncio
import errno
import logging
import sys
from collections.abc import Callable
from typing import Any

import psutil
from uvicorn.protocols.http.h11_impl import H11Protocol

ARRIVAL_SECONDS = 30.0  # for headers and body of a request
READING_SECONDS = 30.0  # after --timeout, for a client to read the end of its answer
TIMEOUT_RESPONSE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
MAX_CONNECTIONS = 4096
RESERVED_DESCRIPTORS = 64  # for files, pipes and what else the process opens
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
LOG_SECONDS = 10.0  # between two lines about refused connections

log = logging.getLogger(__name__)


def count_connections() -> int:
    """How many connections the limit of open files leaves room for."""
    if sys.platform == "win32":  # it has no such limit
        return MAX_CONNECTIONS
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    room = limit - psutil.Process().num_fds() - RESERVED_DESCRIPTORS
    return min(max(room, 1), MAX_CONNECTIONS)


class AcceptErrors:
    """The event loop's exception handler: a line now and then about connections that cannot be accepted.

    asyncio itself waits a second before it accepts again, but reports every attempt.
    """

    def __init__(self) -> None:
        self.logged: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in OUT_OF_RESOURCES:
            loop.default_exception_handler(context)
            return
        now = loop.time()
        if self.logged is None or now > self.logged + LOG_SECONDS:
            self.logged = now
            log.error("no further connection can be accepted now: %s", error.strerror)


class Connection(H11Protocol):
    """A client's connection, closed if the client is too slow.

    It is in one of two states, each with a time limit:

        arriving    headers and body arrive: `ARRIVAL_SECONDS`; uvicorn closes it earlier if nothing arrives
        answering   the answer is decoded and sent: --timeout, and `READING_SECONDS` to read its end

    Attributes:
        seconds: seconds that an answer may take.
        most: maximum number of connections. With more, the one that has been without a request longest is closed.
        timer: calls the timeout handler of the present state.
        timed: the request whose answer is being timed.
    """

    seconds: float
    most: int
    timer: asyncio.TimerHandle | None = None
    timed: object = None

    def connection_made(self, transport: Any) -> None:
        """Begin to time the connection, and close the oldest one without a request if there are too many."""
        super().connection_made(transport)
        self._begin(ARRIVAL_SECONDS, self._refuse)
        if len(self.connections) <= self.most:
            return
        connections: Any = self.connections
        idle_connections = [
            connection
            for connection in connections
            if not connection.is_asking and not connection.transport.is_closing()
        ]
        if idle_connections:
            oldest = min(idle_connections, key=lambda connection: connection.since)
            oldest.transport.abort()

    @property
    def is_asking(self) -> bool:
        """Whether the headers of a request have arrived, and its answer has not been sent completely."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def answering(self) -> bool:
        """Whether a request has arrived completely, and its answer has not been sent completely."""
        return self.is_asking and not self.cycle.more_body

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; the answer is timed once they complete a request."""
        super().data_received(data)
        self._time_answer()

    def on_response_complete(self) -> None:
        """Wait for the next request on the connection."""
        self._begin(ARRIVAL_SECONDS, self._refuse)
        super().on_response_complete()  # may start a request that has arrived meanwhile
        self._time_answer()

    def shutdown(self) -> None:
        """Close the connection when the server ends; a request that is still arriving is dropped."""
        if self.answering:
            super().shutdown()
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer of the connection."""
        if self.timer:
            self.timer.cancel()
        super().connection_lost(exc)

    def _time_answer(self) -> None:
        """Enter the state `answering` once a request has arrived."""
        if self.answering and self.timed is not self.cycle:
            self.timed = self.cycle
            self._begin(self.seconds + READING_SECONDS, self.transport.abort)

    def _begin(self, seconds: float, over: Callable[[], None]) -> None:
        """Enter a state of the connection; `over` is called if it lasts `seconds`."""
        self.since = self.loop.time()
        if self.timer:
            self.timer.cancel()
        self.timer = self.loop.call_later(seconds, over)

    def _refuse(self) -> None:
        """Send 408 unless a response has begun, and close the connection."""
        if self.cycle is None or not self.cycle.response_started:
            self.transport.write(TIMEOUT_RESPONSE)
        self.transport.close()
