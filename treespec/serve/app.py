"""The application: its paths, its errors, and what every request passes first."""

import hashlib
import secrets
from ipaddress import ip_address
from typing import final

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treespec.serve import completions, page
from treespec.serve.errors import ApiError, handled, response
from treespec.serve.replies import Fields
from treespec.serve.state import State, state_of

BODY = 4 << 20  # bytes of a request
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
        seen = 0

        async def bounded() -> Message:  # whatever the headers say
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > BODY:
                raise too_large()
            return message

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.state.metrics.counts["requests"].labels(path, str(message["status"])).inc()
                message["headers"] = [*message["headers"], (b"x-content-type-options", b"nosniff")]
            await send(message)

        request = Request(scope)
        key = self._key(request)
        if key is not None:
            scope["treespec.memory"] = hashlib.sha256(key.encode()).hexdigest()
        error = self._refusal(request, key)
        await (response(error) if error else self.app)(scope, bounded, counted)

    def _refusal(self, request: Request, key: str | None) -> ApiError | None:
        """Why the request goes no further; None: it does. key: the one that it brings."""
        path = request.scope["path"]  # request.url would read it off the Host header, too
        if self.state.ending and path not in ("/metrics", "/health"):
            return self.state.cut()
        if self.state.keys and path not in OPEN and key is None:
            message = "Incorrect API key provided; send it as Authorization: Bearer KEY"
            headers = {"WWW-Authenticate": "Bearer"}
            return ApiError(401, message, code="invalid_api_key", headers=headers)
        if not self.state.keys and not named(request):
            message = "This server answers to localhost: give it an --api-key for other names"
            return ApiError(403, message)
        size = request.headers.get("content-length", "")
        return too_large() if size.isdecimal() and int(size) > BODY else None

    def _key(self, request: Request) -> str | None:
        """The server's key that the request brings; None: it brings none of them."""
        kind, _, brought = request.headers.get("authorization", "").partition(" ")
        given = brought.strip().encode("latin-1")
        # All keys are compared, so that the time does not tell which one was nearly right.
        equal = [key for key in self.state.keys if secrets.compare_digest(given, key.encode())]
        return equal[0] if equal and kind.lower() == "bearer" else None


def named(request: Request) -> bool:
    """False where a request reaches this machine's own address under another machine's name.

    A foreign page could lead its own name to 127.0.0.1, and a browser would let it read the answers.
    """
    arrived, host = (request.scope.get("server") or ("", 0))[0], request.headers.get("host", "")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    return not loopback(arrived) or loopback(name.strip("[]"))


def loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"


def too_large() -> ApiError:
    return ApiError(413, f"the body is larger than this server's limit of {BODY} bytes")


router = APIRouter()


def app_of(state: State) -> FastAPI:
    app = FastAPI(title="treespec", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.treespec = state
    for part in (router, completions.router, page.router):
        app.include_router(part)
    for kind in (HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, handled)
    app.add_middleware(Guard, state=state)
    if origins := state.config.cors:  # the server's own page may call it in any case
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return app


@router.get("/v1/models")
async def models(request: Request) -> Fields:
    return {"object": "list", "data": [_model(state_of(request))]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Fields:
    state = state_of(request)
    state.check_model(name)
    return _model(state)


def _model(state: State) -> Fields:
    spec = state.spec
    fields = {"id": state.name, "object": "model", "created": state.started}
    fields |= {"owned_by": "treespec", "max_model_len": spec.target.context_length}
    fields["dtype"] = str(spec.target.dtype).removeprefix("torch.")
    return fields | {"drafter": spec.source.name if spec.source else None}


@router.api_route("/health", methods=["GET", "HEAD"])
async def health(request: Request) -> Response:
    """200 while requests are answered, 503 once the server shuts down."""
    state, engine = state_of(request), state_of(request).engine
    told: Fields = {"status": "ending" if state.ending else "ok", "model": state.name}
    told |= {"running": engine.running, "waiting": engine.waiting}
    return JSONResponse(told, 503 if state.ending else 200)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    text = state_of(request).metrics.text()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
