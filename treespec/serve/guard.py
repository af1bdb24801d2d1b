"""The middleware before all routes: names and counts requests, checks keys and host names, admits, and watches."""

import asyncio
import hashlib
import secrets
import socket
import time
from functools import cache
from ipaddress import ip_address
from typing import final
from urllib.parse import urlsplit

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treespec.serve.admission import RequestPlace
from treespec.serve.errors import ApiError, build_error_response
from treespec.serve.logs import REQUEST_ID_HEADER, log_request, read_request_id, request_id
from treespec.serve.state import State

MAX_BODY_BYTES = 4 << 20  # of a request
# Looks of the event loop at its sockets before a body is parsed: many a client has left by then.
SOCKET_LOOKS = 6
CLIENT_LEFT_STATUS = 499  # in the log, as nginx has it
OPEN_PATHS = ("/", "/health", "/live")  # need no key: the page itself holds nothing secret
UNREFUSED_PATHS = ("/metrics", "/health", "/live")  # while the server ends, too
CONTENT_SECURITY_POLICY = (  # a browser runs only the server's own scripts and styles
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
]


@final
class Guard:
    """ASGI middleware: bounds bodies, checks keys and host names, admits requests, and ends those of clients that left.

    A request that posts a body holds a place from its headers on. One task then listens to its client, and cancels it
    once the client has left.
    """

    def __init__(self, app: ASGIApp, state: State) -> None:
        self.app = app
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # 0. A path may end with a slash. A redirect would lose the scheme behind a proxy.
        if scope["path"].endswith("/") and scope["path"] != "/":
            scope["path"] = scope["path"][:-1]

        # 1. Name the request; count its response, and add headers.
        began = time.perf_counter()
        name = read_request_id(scope)
        request_id.set(name)
        status = CLIENT_LEFT_STATUS

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                path = "other"
                if "route" in scope:
                    path = scope["route"].path
                self.state.metrics.counts["requests"].labels(path, str(status)).inc()
                headers = [(REQUEST_ID_HEADER, name.encode()), *SECURITY_HEADERS]
                message["headers"] = list(message["headers"]) + headers
            await send(message)

        # 2. Send an error, or let the application answer.
        request = Request(scope)
        try:
            key = self._read_key(request)
            request.state.memory = ""
            if key:
                request.state.memory = hashlib.sha256(key.encode()).hexdigest()
            self._refuse(request, key)
            if scope["method"] == "POST":
                await self._admit(request, receive, send_counted)
            else:
                await self.app(scope, receive, send_counted)
        except ApiError as error:
            await build_error_response(error)(scope, receive, send_counted)
        finally:
            log_request(scope, status, began)

    async def _admit(self, request: Request, receive: Receive, send: Send) -> None:
        """Answer a request that holds a place, until its client leaves. Raises ApiError before the response begins."""
        # 1. Take the place, then the body.
        caller = request.state.memory
        if not self.state.keys and request.client is not None:
            caller = request.client.host
        place = self.state.admission.enter(caller)
        try:
            body = await receive_body(receive, place)
            if body is None:
                return

            async def send_whole(message: Message) -> None:
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    place.is_answered = True  # what follows is no leaving
                await send(message)

            # 2. Wait for a turn, and let the application parse and answer it. It leaves the lane itself.
            request.state.place = place
            listener = asyncio.create_task(watch_client(receive, place, asyncio.current_task()))
            try:
                for _ in range(SOCKET_LOOKS):
                    await asyncio.sleep(0)
                await place.move(self.state.admission.texts)
                await self.app(request.scope, replay_body(body, place), send_whole)
            except TimeoutError:
                raise self.state.build_timeout_error() from None
            except asyncio.CancelledError:
                if not place.is_left:
                    raise
            finally:
                listener.cancel()
        finally:
            place.close()

    def _refuse(self, request: Request, key: str) -> None:
        """Raises ApiError for a request that is refused. key: the request's valid key, or ""."""
        path = request.scope["path"]  # not request.url, which depends on the Host header too
        if (self.state.ending or self.state.failure) and path not in UNREFUSED_PATHS:
            raise self.state.cut()
        if (
            self.state.keys
            and not key
            and path not in OPEN_PATHS
            and not path.startswith("/static/")
        ):
            message = "Incorrect API key provided; send it as Authorization: Bearer KEY"
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, code="invalid_api_key", headers=headers)
        if not self.state.keys and not is_named_rightly(request):
            names = "its addresses and its machine's name"
            message = f"This server answers to {names}: give it an --api-key for other names"
            raise ApiError(403, message)

    def _read_key(self, request: Request) -> str:
        """The API key of the request; "" if it has none or a wrong one."""
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        request_key = credentials.strip().encode("latin-1")
        # Compare with all keys, so that the time does not reveal which key was nearly right.
        matching_keys = [
            key for key in self.state.keys if secrets.compare_digest(request_key, key.encode())
        ]
        if scheme.lower() != "bearer" or not matching_keys:
            return ""
        return matching_keys[0]


async def receive_body(receive: Receive, place: RequestPlace) -> bytes | None:
    """Receive a request's body; None if the client leaves. Raises ApiError for one that is too large."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:  # whatever Content-Length says
            raise ApiError(
                413, f"the body is larger than this server's limit of {MAX_BODY_BYTES} bytes"
            )
        place.hold("bytes", len(part))
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


def replay_body(body: bytes, place: RequestPlace) -> Receive:
    """Build what the application receives: the body, then that the client has left, once it has."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await place.gone.wait()
        return {"type": "http.disconnect"}

    return receive


async def watch_client(
    receive: Receive, place: RequestPlace, request: asyncio.Task[None] | None
) -> None:
    """Wait until the client leaves, or has its whole answer; cancel a request that is left."""
    while (await receive())["type"] != "http.disconnect":
        pass
    place.gone.set()
    if request is not None and not place.is_answered:
        place.is_left = True
        request.cancel()


def is_named_rightly(request: Request) -> bool:
    """Whether the Host header of a request is a name of this machine, or an IP address.

    A loopback address has only loopback names. The check prevents DNS rebinding: a foreign page could resolve its own
    name to the server's address, and read the answers.
    """
    is_local = ip_address(request.scope["server"][0]).is_loopback
    try:
        name = urlsplit("//" + request.headers.get("host", "")).hostname or ""
        if name == "localhost":
            return True
        if not is_local and name in list_machine_names():
            return True
        address = ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or not is_local


@cache
def list_machine_names() -> frozenset[str]:
    """List the names by which other machines know this one, in lower case."""
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})
