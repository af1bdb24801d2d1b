"""`treespec serve`: OpenAI's HTTP API and a page to chat on."""

import socket
from dataclasses import replace
from importlib.util import find_spec

from treespec.cli.config import load_spec
from treespec.cli.early import begin_answers
from treespec.cli.options import takes
from treespec.demo.known import DEMO
from treespec.errors import InputError
from treespec.serve.options import ServeConfig

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


@takes(ServeConfig)
def serve(config: ServeConfig) -> None:
    """Answer OpenAI's HTTP API, and show a page to chat on.

    Ctrl-C or SIGTERM ends the server once running answers have finished.
    """
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise InputError(f"the server needs {', '.join(missing)}: pip install 'treespec[serve]'")
    begin_answers(config, words=False, chats=False)
    listening = bound(config.host, config.port)
    spec = load_spec(config)
    spec.warm_up()
    from treespec.serve import run

    name = config.name or (DEMO if config.target == DEMO else None)
    run.serve(spec, replace(config, name=name), listening)


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
