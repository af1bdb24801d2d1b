"""The application: its paths, its errors, and what every request passes first."""

from collections.abc import Sequence

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse

from treespec.serve import chat, completions, page
from treespec.serve.errors import add_handlers
from treespec.serve.guard import Guard
from treespec.serve.state import State, state_of
from treespec.serve.wire import Fields

router = APIRouter()


def app_of(state: State, origins: Sequence[str] = ()) -> FastAPI:
    """origins: pages of these may call the server from a browser; the server's own always may."""
    app = FastAPI(title="treespec", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.treespec = state
    for part in (router, chat.router, completions.router, page.router):
        app.include_router(part)
    add_handlers(app)
    app.add_middleware(Guard, state=state)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
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
