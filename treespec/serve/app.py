"""The application: its routes, and the middleware that checks and counts every request."""

import hashlib
import secrets
import socket
from functools import cache
from ipaddress import ip_address
from typing import final
from urllib.parse import urlsplit

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treespec.serve import completions, page, responses
from treespec.serve.errors import ApiError, build_error_response, handle_error
from treespec.serve.protocol import Fields
from treespec.serve.state import State, get_state

MAX_BODY_BYTES = 4 << 20  # of a request
OPEN_PATHS = ("/", "/health")  # need no key: the page itself holds nothing secret
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
    """ASGI middleware: bounds bodies, checks keys and host names, adds security headers, counts requests."""

    def __init__(self, app: ASGIApp, state: State) -> None:
        self.app = app
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # 0. A path may end with a slash. A redirect would lose the scheme behind a proxy.
        if scope["path"].endswith("/") and scope["path"] != "/":
            scope["path"] = scope["path"][:-1]

        # 1. Bound the body, whatever Content-Length says; count responses, and add headers.
        received_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > MAX_BODY_BYTES:
                raise ApiError(
                    413, f"the body is larger than this server's limit of {MAX_BODY_BYTES} bytes"
                )
            return message

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = "other"
                if "route" in scope:
                    path = scope["route"].path
                self.state.metrics.counts["requests"].labels(path, str(message["status"])).inc()
                message["headers"] = list(message["headers"]) + SECURITY_HEADERS
            await send(message)

        # 2. Send an error, or let the application answer.
        request = Request(scope)
        key = self._read_key(request)
        request.state.memory = ""
        if key:
            request.state.memory = hashlib.sha256(key.encode()).hexdigest()
        error = self._find_refusal(request, key)
        if error:
            await build_error_response(error)(scope, receive_bounded, send_counted)
        else:
            await self.app(scope, receive_bounded, send_counted)

    def _find_refusal(self, request: Request, key: str) -> ApiError | None:
        """The error for a request that is refused; None if it may pass. key: the request's valid key, or ""."""
        path = request.scope["path"]  # not request.url, which depends on the Host header too
        if self.state.ending and path not in ("/metrics", "/health"):
            return self.state.cut()
        if (
            self.state.keys
            and not key
            and path not in OPEN_PATHS
            and not path.startswith("/static/")
        ):
            message = "Incorrect API key provided; send it as Authorization: Bearer KEY"
            headers = {"WWW-Authenticate": "Bearer"}
            return ApiError(401, message, code="invalid_api_key", headers=headers)
        if not self.state.keys and not is_named_rightly(request):
            message = "This server answers to addresses and to its machine's name: give it an --api-key for other names"
            return ApiError(403, message)
        return None

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
    """Lists the names by which other machines know this one, in lower case."""
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})


router = APIRouter()


def build_app(state: State) -> FastAPI:
    """Build the FastAPI application with all routes, error handlers and middleware."""
    app = FastAPI(
        title="treespec", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.state.treespec = state
    for part in (router, completions.router, responses.router, page.router):
        app.include_router(part)
    app.mount("/static", StaticFiles(directory=page.STATIC_FOLDER))
    for kind in (HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, handle_error)
    app.add_middleware(Guard, state=state)
    origins = state.config.cors
    if origins:  # the server's page may always call it
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return app


@router.get("/v1/models")
async def models(request: Request) -> Fields:
    """List the server's one model."""
    return {"object": "list", "data": [_describe_model(get_state(request))]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Fields:
    """Describe the server's model; 404 for any other name."""
    state = get_state(request)
    state.check_model(name)
    return _describe_model(state)


def _describe_model(state: State) -> Fields:
    """Build the fields of the server's model."""
    target = state.spec.target
    drafter = None
    if state.spec.source:
        drafter = state.spec.source.name
    return {
        "id": state.name,
        "object": "model",
        "created": state.started,
        "owned_by": "treespec",
        "max_model_len": target.context_length,
        "dtype": str(target.dtype).removeprefix("torch."),
        "drafter": drafter,
    }


@router.api_route("/health", methods=["GET", "HEAD"])
async def health(request: Request) -> Response:
    """Answer 200 while requests are served, 503 once the server shuts down."""
    state = get_state(request)
    status = "ok"
    status_code = 200
    if state.ending:
        status = "ending"
        status_code = 503
    fields = {
        "status": status,
        "model": state.name,
        "running": state.engine.running,
        "waiting": state.engine.waiting,
    }
    return JSONResponse(fields, status_code)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Answer with the metrics in Prometheus' text format."""
    text = generate_latest(get_state(request).metrics.registry)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
