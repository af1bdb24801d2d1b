"""What every request passes first: the server's end, the key, the size of the body."""

import secrets
from typing import final

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treespec.serve.errors import ApiError, response
from treespec.serve.state import State

OPEN = ("/", "/health")  # without a key; the page itself holds nothing secret
PATHS = (
    *OPEN,
    *("/v1/models", "/v1/chat/completions", "/v1/completions", "/tokenize", "/metrics", "/cycles"),
)


@final
class Guard:
    """ASGI middleware; it counts requests by path and status, too."""

    def __init__(self, app: ASGIApp, state: State) -> None:
        self.app, self.state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in PATHS else "other"
        bounded = Bounded(receive, self.state.limits.body)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.state.metrics.requests.labels(path, str(message["status"])).inc()
                message["headers"] = [*message["headers"], (b"x-content-type-options", b"nosniff")]
            await send(message)

        error = self._refusal(Request(scope))
        await (response(error) if error else self.app)(scope, bounded, counted)

    def _refusal(self, request: Request) -> ApiError | None:
        path = request.scope["path"]  # request.url would read it off the Host header, too
        if self.state.ending and path not in ("/metrics", "/health"):
            return self.state.cut()
        if self.state.api_key and path not in OPEN and not self._known(request):
            message = "Incorrect API key provided; send it as Authorization: Bearer KEY"
            headers = {"WWW-Authenticate": "Bearer"}
            return ApiError(401, message, code="invalid_api_key", headers=headers)
        size = request.headers.get("content-length", "")
        most = self.state.limits.body
        return too_large(most) if size.isdecimal() and int(size) > most else None

    def _known(self, request: Request) -> bool:
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        wanted = (self.state.api_key or "").encode()
        return kind.lower() == "bearer" and secrets.compare_digest(
            key.strip().encode("latin-1"), wanted
        )


@final
class Bounded:
    """Receives a body of at most `most` bytes, whatever its headers say."""

    def __init__(self, receive: Receive, most: int) -> None:
        self.receive, self.most, self.seen = receive, most, 0

    async def __call__(self) -> Message:
        message = await self.receive()
        self.seen += len(message.get("body", b""))
        if self.seen > self.most:
            raise too_large(self.most)
        return message


def too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than this server's limit of {most} bytes")
