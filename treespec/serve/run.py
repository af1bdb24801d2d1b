"""Run the HTTP server until a signal ends it; limit the time of each connection."""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any, NamedTuple, final

import uvicorn
from fastapi.concurrency import run_in_threadpool
from uvicorn.protocols.http.h11_impl import H11Protocol

from treespec.api.spec import Spec
from treespec.serve.app import build_app
from treespec.serve.options import ServeConfig
from treespec.serve.state import State
from treespec.serve.tool_forms import TOOL_FORMS, detect_tool_form
from treespec.text.templates import get_template_source

ARRIVAL_SECONDS = 30.0  # for headers and body of a request
READING_SECONDS = 30.0  # after --timeout, for a client to read the end of its answer
TIMEOUT_RESPONSE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connection(H11Protocol):
    """A client's connection, closed if the client is too slow.

    It is in one of two states, each with a time limit:

        arriving    headers and body arrive: `ARRIVAL_SECONDS`; uvicorn closes it earlier if nothing arrives
        answering   the answer is decoded and sent: --timeout, and `READING_SECONDS` to read its end

    Attributes:
        seconds: seconds that an answer may take.
        most: maximum number of connections. With more, the connection that has been idle longest is closed.
        timer: calls the timeout handler of the present state.
        timed: the request whose answer is being timed.
    """

    seconds: float
    most: int
    timer: asyncio.TimerHandle | None = None
    timed: object = None

    def connection_made(self, transport: Any) -> None:
        """Begin to time the connection, and close the oldest idle one if there are too many."""
        super().connection_made(transport)
        self._begin(ARRIVAL_SECONDS, self._refuse)
        connections: Any = self.connections
        open_connections = [
            connection for connection in connections if not connection.transport.is_closing()
        ]
        if len(open_connections) > self.most:
            idle_connections = [
                connection for connection in open_connections if not connection.answering
            ]
            oldest = min(idle_connections, key=lambda connection: connection.since)
            oldest.transport.abort()

    @property
    def answering(self) -> bool:
        """Whether a request has arrived completely, and its answer has not been sent completely."""
        cycle = self.cycle
        if cycle is None or cycle.more_body:
            return False
        return not cycle.response_complete

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


SPARE_CONNECTIONS = 128  # in addition to those whose answers run or wait
PUBLIC_WARNING = "every machine that reaches this address may ask: demand a key by --api-key KEY"
FAREWELL_SECONDS = 1.0  # for clients to read that their answer was cut off


@final
class HttpServer(uvicorn.Server):
    """A uvicorn server whose running answers have --grace seconds to finish after the first signal."""

    def __init__(self, state: State) -> None:
        super().__init__(build_uvicorn_config(state))
        self.state = state

    def handle_exit(self, sig: int, frame: object) -> None:
        """Begin to shut down. A second Ctrl-C does not wait. uvicorn's own handler would raise the signal again."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running answers, and cut them off after --grace seconds."""
        self.state.ending = True
        cutting = asyncio.create_task(self._cut())
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()

    async def _cut(self) -> None:
        """Cut off running answers after --grace seconds, or at once after a second signal."""
        end = asyncio.get_running_loop().time() + self.state.config.grace
        while asyncio.get_running_loop().time() < end and not self.force_exit:
            await asyncio.sleep(0.1)
        self.state.cut_off = True
        await run_in_threadpool(self.state.engine.close, finish=False)
        await asyncio.sleep(FAREWELL_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class Served(NamedTuple):
    """What a server answered.

    Attributes:
        tokens: number of tokens of its answers.
        cycles: number of their target forwards.
    """

    tokens: int
    cycles: int


def serve(spec: Spec, config: ServeConfig, listening: socket.socket) -> Served:
    """Answer requests until SIGINT or SIGTERM. listening: the socket that accepts connections."""
    state = State(spec, config)
    try:
        host, port = listening.getsockname()[:2]
        if ":" in host:  # IPv6
            host = f"[{host}]"
        url = f"http://{host}:{port}"
        print(f"{state.name} at {url}/v1, a page at {url}/ ({spec.drafting_sentence})", flush=True)
        warnings = list_form_warnings(spec)
        if not config.keys and not ip_address(listening.getsockname()[0]).is_loopback:
            warnings.append(PUBLIC_WARNING)
        for warning in warnings:
            print(warning, file=sys.stderr)
        HttpServer(state).run([listening])
    finally:
        state.engine.close(finish=False)
    print("ended", file=sys.stderr)
    read_count = state.metrics.registry.get_sample_value
    tokens = read_count("treespec_completion_tokens_total") or 0
    cycles = read_count("treespec_cycles_total") or 0
    return Served(int(tokens), int(cycles))


def list_form_warnings(spec: Spec) -> list[str]:
    """List what clients should know of the chat template: that the form of its tool calls is unknown."""
    tokenizer = spec.target.tokenizer
    if tokenizer is None or spec.template is not None or not tokenizer.chat_template:
        return []
    probe = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    if detect_tool_form(get_template_source(tokenizer, None, probe)) is not None:
        return []
    families = ", ".join(form.family for form in TOOL_FORMS)
    return [
        "the chat template shows tools in a form that is not known: tool calls come back as text, unless "
        f"a request's tool_choice demands one (known: {families})"
    ]


def build_uvicorn_config(state: State) -> uvicorn.Config:
    """Configure uvicorn with the application and the connection limits of the server."""

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
