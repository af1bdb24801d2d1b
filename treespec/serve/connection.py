"""The connections of a server: how many there are, and how long each may take."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from treespec.serve.limits import Limits

LATE = 30.0  # seconds beyond `Limits.seconds` for a client to read the end of its answer
TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connection(H11Protocol):
    """A client's connection, closed where the client is too slow.

    arriving    headers and body: `Limits.arrival` seconds
    answering   `Limits.seconds`, and LATE to read the end
    idle        uvicorn's own time for a further request
    """

    limits: Limits
    most: int  # connections; beyond it the longest one that is not answering gives way

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.timer: asyncio.TimerHandle | None = None
        self.timed: object = None  # the request whose answer is timed
        self._arriving()
        opened: Any = [one for one in self.connections if not one.transport.is_closing()]
        if len(opened) > self.most:
            waiting = [one for one in opened if not one.answering]
            min(waiting, key=lambda one: one.since).transport.abort()

    @property
    def answering(self) -> bool:
        """Whether a request has arrived as a whole, and its answer is not yet sent."""
        cycle = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def data_received(self, data: bytes) -> None:
        if self.timer is None:
            self._arriving()
        super().data_received(data)
        self._time_answer()

    def on_response_complete(self) -> None:
        self._stop()
        super().on_response_complete()  # may begin a request that has arrived since
        if not self.cycle.response_complete:
            self._arriving()
            self._time_answer()

    def shutdown(self) -> None:
        """The server ends: what is still arriving is not waited for."""
        if self.answering:
            super().shutdown()
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _arriving(self) -> None:
        self._stop()
        self.timer = self.loop.call_later(self.limits.arrival, self._refuse)

    def _time_answer(self) -> None:
        if self.answering and self.timed is not self.cycle:
            self._stop()
            self.timed = self.cycle
            seconds = self.limits.seconds + LATE
            self.timer = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self) -> None:
        """Begin another state, without a timer."""
        self.since = self.loop.time()
        if self.timer:
            self.timer.cancel()
        self.timer = None

    def _refuse(self) -> None:
        if self.cycle is None or not self.cycle.response_started:
            self.transport.write(TIMEOUT)
        self.transport.close()
