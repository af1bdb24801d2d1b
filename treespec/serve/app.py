"""The application: its routes, and what it tells of itself."""

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException

from treespec.serve import completions, page, responses
from treespec.serve.errors import handle_error
from treespec.serve.guard import Guard
from treespec.serve.protocol import Fields
from treespec.serve.state import State, get_state

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
    for kind in (HTTPException, Exception):
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
    """Answer 200 while requests are served; 503 once the server shuts down, or its engine is dead."""
    state = get_state(request)
    status = "ok"
    if state.failure:
        status = state.failure
    elif state.ending:
        status = "ending"
    status_code = 503
    if status == "ok":
        status_code = 200
    fields = {
        "status": status,
        "model": state.name,
        "running": state.engine.running,
        "waiting": state.engine.waiting,
    }
    return JSONResponse(fields, status_code)


@router.api_route("/live", methods=["GET", "HEAD"])
async def live(request: Request) -> Response:
    """Answer 200 unless the server should be started again: its engine is dead."""
    failure = get_state(request).failure
    if failure:
        return JSONResponse({"status": failure}, 503)
    return JSONResponse({"status": "ok"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Answer with the metrics in Prometheus' text format."""
    text = generate_latest(get_state(request).metrics.registry)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
