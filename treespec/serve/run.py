"""Run the server until a signal ends it: answers get a while to finish, then they are cut off."""

import asyncio
import copy
import errno
import logging
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import uvicorn
from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool

from treespec.serve.address import BACKLOG
from treespec.serve.connection import Connection
from treespec.serve.state import State

log = logging.getLogger(__name__)
SPARE = 128  # connections beside those whose answers run and wait
FAREWELL = 1.0  # seconds to read that an answer was cut off
AGAIN = 60.0  # seconds between two lines on failing accepts


@final
class Server(uvicorn.Server):
    """grace: seconds that running answers have to finish after the first signal."""

    def __init__(self, config: uvicorn.Config, state: State, grace: float) -> None:
        super().__init__(config)
        self.state, self.grace = state, grace
        self.told = -AGAIN  # when failing accepts were last told

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._failed)
        await super().startup(sockets)

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error that nobody awaits. asyncio tells every accept that fails for want of files."""
        if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() >= self.told + AGAIN:
            self.told = loop.time()
            log.error("connections wait: too many files are open (raise the limit: ulimit -n)")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.state.ending = True
        cutting = asyncio.create_task(self._cut())
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()

    async def _cut(self) -> None:
        """Cut off what still runs after the grace, or at once after a second signal."""
        end = asyncio.get_running_loop().time() + self.grace
        while asyncio.get_running_loop().time() < end and not self.force_exit:
            await asyncio.sleep(0.1)
        self.state.cut_off = True
        await run_in_threadpool(self.state.engine.close, finish=False)
        await asyncio.sleep(FAREWELL)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def serve(
    app: FastAPI, state: State, sockets: Sequence[socket.socket], grace: float, log: bool
) -> None:
    """Answer requests until SIGINT or SIGTERM. The caller closes the engine."""
    with ended_by_signals():
        Server(config_of(app, state, log), state, grace).run(list(sockets))


def config_of(app: FastAPI, state: State, log: bool) -> uvicorn.Config:
    """log: tell every request on standard error."""

    class Limited(Connection):
        limits, most = state.limits, state.engine.batch + state.engine.queue + SPARE

    return uvicorn.Config(
        app,
        http=Limited,
        backlog=BACKLOG,
        log_config=_log_config(),
        log_level="info" if log else "error",
        access_log=log,
        server_header=False,
        lifespan="off",
        ws="none",
    )


def _log_config() -> dict[str, Any]:
    """uvicorn's own, with requests on standard error, too."""
    config: dict[str, Any] = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    return config


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, uvicorn's own handlers end the server; the signals that it raises anew do nothing."""
    ends = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(end, lambda *_: None) for end in ends]
    try:
        yield
    finally:
        for end, handler in zip(ends, before, strict=True):
            signal.signal(end, handler)
