"""Run the server until a signal ends it; its connections, and how long each may take."""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, final

import uvicorn
from fastapi.concurrency import run_in_threadpool
from uvicorn.protocols.http.h11_impl import H11Protocol

from treespec.api.spec import Spec
from treespec.serve.app import build_app
from treespec.serve.options import ServeConfig
from treespec.serve.state import State

ARRIVAL_SECONDS = 30.0  # seconds for headers and body of a request
READING_SECONDS = 30.0  # seconds beyond --timeout for a client to read the end of its answer
TIMEOUT_RESPONSE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connection(H11Protocol):
    """A client's connection, closed if the client is too slow.

    arriving    headers and body: ARRIVAL seconds; uvicorn closes it earlier if nothing comes
    answering   --timeout, and LATE to read the end
    """

    seconds: float  # that an answer may take
    most: int  # connections; beyond it the oldest idle one is closed
    timer: asyncio.TimerHandle | None = None
    timed: object = None  # the request whose answer is timed

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._begin(ARRIVAL_SECONDS, self._refuse)
        connections: Any = self.connections
        opened = [other for other in connections if not other.transport.is_closing()]
        if len(opened) > self.most:
            idle = [other for other in opened if not other.answering]
            oldest = min(idle, key=lambda other: other.since)
            oldest.transport.abort()

    @property
    def answering(self) -> bool:
        """Whether a request has arrived as a whole, and its answer is not yet sent."""
        cycle = self.cycle
        if cycle is None or cycle.more_body:
            return False
        return not cycle.response_complete

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_answer()

    def on_response_complete(self) -> None:
        self._begin(ARRIVAL_SECONDS, self._refuse)
        super().on_response_complete()  # may begin a request that has arrived since
        self._time_answer()

    def shutdown(self) -> None:
        """End with the server: a request that is still arriving is dropped."""
        if self.answering:
            super().shutdown()
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timer:
            self.timer.cancel()
        super().connection_lost(exc)

    def _time_answer(self) -> None:
        if self.answering and self.timed is not self.cycle:
            self.timed = self.cycle
            self._begin(self.seconds + READING_SECONDS, self.transport.abort)

    def _begin(self, seconds: float, over: Callable[[], None]) -> None:
        """Begin another state of the connection. After so many seconds in it, `over` is called."""
        self.since = self.loop.time()
        if self.timer:
            self.timer.cancel()
        self.timer = self.loop.call_later(seconds, over)

    def _refuse(self) -> None:
        if self.cycle is None or not self.cycle.response_started:
            self.transport.write(TIMEOUT_RESPONSE)
        self.transport.close()


SPARE_CONNECTIONS = 128  # connections beside those whose answers run and wait
FAREWELL_SECONDS = 1.0  # seconds to read that an answer was cut off


@final
class HttpServer(uvicorn.Server):
    """Running answers have --grace seconds to finish after the first signal."""

    def __init__(self, state: State) -> None:
        super().__init__(build_uvicorn_config(state))
        self.state = state

    def handle_exit(self, sig: int, frame: object) -> None:
        """Unlike uvicorn's, which raises the signal again at the end. A second Ctrl-C does not wait."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.state.ending = True
        cutting = asyncio.create_task(self._cut())
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()

    async def _cut(self) -> None:
        """Cut off the answers that still run after the grace, or at once after a second signal."""
        end = asyncio.get_running_loop().time() + self.state.config.grace
        while asyncio.get_running_loop().time() < end and not self.force_exit:
            await asyncio.sleep(0.1)
        self.state.cut_off = True
        await run_in_threadpool(self.state.engine.close, finish=False)
        await asyncio.sleep(FAREWELL_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def serve(spec: Spec, config: ServeConfig, listening: socket.socket) -> None:
    """Answer requests until SIGINT or SIGTERM."""
    state = State(spec, config)
    try:
        host, port = listening.getsockname()[:2]
        if ":" in host:  # of IPv6
            host = f"[{host}]"
        url = f"http://{host}:{port}"
        print(f"{state.name} at {url}/v1, a page at {url}/", flush=True)
        HttpServer(state).run([listening])
    finally:
        state.engine.close(finish=False)
    print("ended", file=sys.stderr)


def build_uvicorn_config(state: State) -> uvicorn.Config:
    class Limited(Connection):
        seconds = state.config.timeout
        most = state.engine.batch + state.engine.queue + SPARE_CONNECTIONS

    log_level = "error"
    if state.config.log:
        log_level = "info"
    uvicorn.config.LOGGING_CONFIG["handlers"]["access"]["stream"] = "ext://sys.stderr"
    return uvicorn.Config(
        build_app(state),
        http=Limited,
        log_level=log_level,
        access_log=state.config.log,
        server_header=False,
        lifespan="off",
        ws="none",
    )
