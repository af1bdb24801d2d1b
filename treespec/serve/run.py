"""Run the HTTP server until a signal ends it, or its engine dies."""

import asyncio
import logging
import os
import signal
import socket
import sys
from functools import partial
from ipaddress import ip_address
from threading import Thread
from typing import NamedTuple, final

import uvicorn

from treespec.api.engine import Engine
from treespec.api.spec import Spec
from treespec.serve.app import build_app
from treespec.serve.connections import AcceptErrors, Connection, count_connections
from treespec.serve.logs import build_log_config
from treespec.serve.options import ServeConfig
from treespec.serve.state import State
from treespec.serve.tool_forms import TOOL_FORMS, detect_tool_form
from treespec.text.templates import get_template_source

log = logging.getLogger(__name__)


TICK_SECONDS = 0.1  # between two calls of on_tick
MIN_STEP_SECONDS = 60.0
LAST_STEP_SECONDS = 30.0  # for the engine's thread to end
BACKLOG = 128  # connections that wait to be accepted
PUBLIC_WARNING = "every machine that reaches this address may ask: demand a key by --api-key KEY"
FAREWELL_SECONDS = 1.0  # for clients to read that their answer was cut off


@final
class HttpServer(uvicorn.Server):
    """A uvicorn server whose running answers have --grace seconds to finish after the first signal."""

    def __init__(self, state: State) -> None:
        super().__init__(build_uvicorn_config(state))
        self.state = state
        self.watch = EngineWatch(state.engine, state.config.timeout)

    def handle_exit(self, sig: int, frame: object) -> None:
        """Begin to shut down. A second Ctrl-C does not wait. uvicorn's own handler would raise the signal again."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running answers, and cut them off after --grace seconds; at once if the engine is dead."""
        self.state.ending = True
        cutting = asyncio.create_task(self._cut())
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()

    async def _cut(self) -> None:
        """Cut off running answers after --grace seconds, or at once after a second signal."""
        # 1. Wait.
        end = asyncio.get_running_loop().time() + self.state.config.grace
        while asyncio.get_running_loop().time() < end and not self.force_exit:
            if self.state.failure:
                break
            await asyncio.sleep(0.1)

        # 2. End all requests, whatever their threads do; their clients have a second to read that.
        self.state.cut_off = True
        self.state.admission.expire()
        closing = partial(self.state.engine.close, finish=False)
        Thread(target=closing, name="treespec-closing", daemon=True).start()
        await asyncio.sleep(FAREWELL_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for task in list(self.server_state.tasks):
            task.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        asyncio.get_running_loop().set_exception_handler(AcceptErrors())
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Every tenth of a second: whether to end the server. A dead engine ends it."""
        self.state.failure = self.watch.find_failure()
        if self.state.failure:
            log.error("%s", self.state.failure)
            self.should_exit = True
        return await super().on_tick(counter)


@final
class EngineWatch:
    """Finds out that the engine is dead: its thread has ended, or a step takes longer than any answer may.

    It counts its looks instead of seconds: a process that was stopped for a while is not dead.
    """

    def __init__(self, engine: Engine, seconds: float) -> None:
        """seconds: the longest step."""
        self.engine = engine
        self.seconds = max(seconds, MIN_STEP_SECONDS)
        self.steps = 0  # at the latest look
        self.looks = 0  # since that number has changed

    def find_failure(self) -> str | None:
        """What is wrong with the engine, in words; None if it decodes or waits. Call it every tenth of a second."""
        if self.engine.failure:
            return self.engine.failure
        if not self.engine.running or self.engine.steps != self.steps:
            self.looks = 0
        self.steps = self.engine.steps
        self.looks += 1
        if self.looks * TICK_SECONDS > self.seconds:
            return f"the engine hangs: a step takes longer than {self.seconds:g} s"
        return None


class Served(NamedTuple):
    """What a server answered.

    Attributes:
        tokens: number of tokens of its answers.
        cycles: number of their target forwards.
    """

    tokens: int
    cycles: int


def serve(spec: Spec, config: ServeConfig, listening: socket.socket) -> Served:
    """Answer requests until SIGINT or SIGTERM. listening: the socket that accepts connections.

    Raises: RuntimeError if the engine died. If its thread hangs, the process ends with code 1 at once.
    """
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
        has_ended = state.engine.close(finish=False, seconds=LAST_STEP_SECONDS)
    if not has_ended:
        print(f"treespec: {state.failure or 'a step does not end'}", file=sys.stderr, flush=True)
        os._exit(1)  # a thread that computes must not outlive the interpreter
    if state.failure:
        raise RuntimeError(state.failure)
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
        most = count_connections()

    log_config = build_log_config(state.config.log or state.config.log_json, state.config.log_json)
    return uvicorn.Config(
        build_app(state),
        http=Limited,
        log_config=log_config,
        log_level=None,
        access_log=False,  # Guard logs
        backlog=BACKLOG,
        server_header=False,
        lifespan="off",
        ws="none",
    )
