"""`treespec serve`: OpenAI's HTTP API and a page to chat on."""

import os
import re
import socket
import sys
from dataclasses import dataclass
from importlib.util import find_spec

from treespec.api.options import ModelOptions, TargetOptions
from treespec.cli.config import load_spec
from treespec.cli.early import begin_answers
from treespec.cli.options import takes
from treespec.demo.known import DEMO
from treespec.errors import InputError
from treespec.options import MANY, TOKENS, CommandOptions, option, shared

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
KEY = "TREESPEC_API_KEY"
ORIGIN = r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+"  # as browsers send it; null is a local file's


@dataclass(frozen=True, kw_only=True)
class AddressOptions(CommandOptions):
    """Where the server listens, and who may ask."""

    PANEL = "Server"

    host: str = option(
        "address to listen on; 0.0.0.0 is every network of this machine", "127.0.0.1"
    )
    port: int = option("port to listen on; 0 takes a free one", 8000, least=0, most=65535)
    name: str | None = option("the model's name in requests; default: the target's", None)
    api_key: list[str] | None = option(
        "key that requests must bring; repeat the option for several callers; default: those in the "
        f"environment variable {KEY}, separated by spaces, else none",
        None,
    )
    cors: list[str] | None = option(
        "origin of pages that may call the server from a browser, such as http://localhost:3000, or * "
        "for all; repeat the option for several",
        None,
    )
    log: bool = option("log every request on standard error", False)


@dataclass(frozen=True, kw_only=True)
class LimitOptions(CommandOptions):
    """What one request may take of the server."""

    PANEL = "Limits"

    batch: int = option("answers decoded at a time", 8, least=1, most=4096)
    queue: int = option("answers that may wait; further requests get 429", 64, least=0, most=MANY)
    max_tokens: int = option(
        "most tokens of an answer, and the default of chats", 4096, least=1, most=TOKENS
    )
    max_prompt: int | None = option(
        "most tokens of a prompt; default: the model's context", None, least=1, most=MANY
    )
    max_answers: int = option(
        "most answers of a request: its prompts times n", 64, least=1, most=4096
    )
    max_body: int = option("most bytes of a request", 4 << 20, least=1024, most=MANY)
    timeout: float = option("most seconds of a request", 600.0, above=0, most=MANY)
    arrival: float = option(
        "most seconds for the headers and body of a request to arrive", 30.0, above=0, most=MANY
    )
    grace: float = option(
        "seconds that running answers have to finish when the server ends", 30.0, least=0, most=MANY
    )


@dataclass(frozen=True, kw_only=True)
class ServeConfig(ModelOptions, LimitOptions, AddressOptions):
    PANEL = "Answers"

    target: str = shared(TargetOptions, "target", DEMO)
    temperature: float = option(
        "sampling temperature of requests that name none; 0 is greedy", 1.0, least=0, most=100
    )


@takes(ServeConfig)
def serve(config: ServeConfig) -> None:
    """Answer OpenAI's HTTP API, and show a page to chat on.

    Ctrl-C or SIGTERM ends the server once running answers have finished.
    """
    # 1. What can fail without weights.
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise InputError(f"the server needs {', '.join(missing)}: pip install 'treespec[serve]'")
    for origin in config.cors or ():
        if not re.fullmatch(ORIGIN, origin):
            raise InputError(
                f"--cors is {origin!r}, must be an origin such as http://localhost:3000, or * for all"
            )
    keys = [key.strip() for key in config.api_key or os.environ.get(KEY, "").split()]
    if "" in keys:
        raise InputError("--api-key is empty: give the key that requests bring, or leave it out")
    begin_answers(config, words=False, chats=False)
    listening = bound(config.host, config.port)

    # 2. The engine, and the application over it.
    spec = load_spec(config)
    from treespec.api.engine import Engine
    from treespec.serve import run
    from treespec.serve.app import app_of
    from treespec.serve.metrics import Metrics
    from treespec.serve.state import Limits, State

    spec.warm_up()
    limits = Limits(
        body=config.max_body,
        prompt=config.max_prompt,
        tokens=config.max_tokens,
        answers=config.max_answers,
        seconds=config.timeout,
        arrival=config.arrival,
    )
    engine = Engine(spec, batch=config.batch, queue=config.queue)
    state = State(
        spec=spec,
        engine=engine,
        name=config.name or (DEMO if config.target == DEMO else spec.name),
        limits=limits,
        metrics=Metrics(engine),
        api_key=keys,
        temperature=config.temperature,
        allow_lossy=config.allow_lossy,
    )

    # 3. Until a signal.
    try:
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(
            f"{state.name} at http://{shown}:{port}/v1, a page at http://{shown}:{port}/",
            flush=True,
        )
        run.serve(app_of(state, config.cors or ()), state, [listening], config.grace, config.log)
    finally:
        engine.close(finish=False)
    print("ended", file=sys.stderr)


def bound(host: str, port: int) -> socket.socket:
    """A listening socket. Raises InputError for an address that cannot be had.

    port: 0 takes a free one.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        own = socket.socket(family, socket.SOCK_STREAM)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind((host, port))
        own.listen()
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"cannot listen on {host}, port {port}: {reason}; name others by --host and --port"
        ) from error
    return own
