"""Run the server until a signal ends it: answers get a while to finish, then they are cut off."""

import asyncio
import copy
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import uvicorn
from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool

from treespec.errors import InputError
from treespec.serve.state import State


@final
class Server(uvicorn.Server):
    """grace: seconds that running answers have to finish after the first signal."""

    def __init__(self, config: uvicorn.Config, state: State, grace: float) -> None:
        super().__init__(config)
        self.state, self.grace = state, grace

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


def serve(
    app: FastAPI, state: State, sockets: Sequence[socket.socket], grace: float, log: bool
) -> None:
    """Answer requests until SIGINT or SIGTERM. The caller closes the engine."""
    config = uvicorn.Config(
        app,
        log_config=_log_config(),
        log_level="info" if log else "warning",
        access_log=log,
        server_header=False,
        lifespan="off",
        ws="none",
    )
    with ended_by_signals():
        Server(config, state, grace).run(list(sockets))


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


def bound(host: str, port: int) -> socket.socket:
    """A listening socket. Raises InputError for an address that cannot be had.

    port: 0 takes a free one.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        own = socket.socket(family, socket.SOCK_STREAM)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind((host, port))
        own.listen(128)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"cannot listen on {host}, port {port}: {reason}; name others by --host and --port"
        ) from error
    return own
