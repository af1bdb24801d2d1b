"""What answers while the models load: 503, so that nobody waits in vain. It loads no torch."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

READ_SECONDS = 2.0  # for a client to send its request


class LoadingHandler(BaseHTTPRequestHandler):
    """Answers every request with 503, but /live with 200."""

    timeout = READ_SECONDS

    def respond(self) -> None:
        """Send the answer, and close the connection."""
        status = HTTPStatus.SERVICE_UNAVAILABLE
        message = "the server is loading its models"
        fields: dict[str, object] = {"status": "loading"}
        if self.path == "/live":
            status = HTTPStatus.OK
        elif self.path != "/health":
            fields = {
                "error": {"message": message, "type": "server_error", "param": None, "code": None}
            }
        body = json.dumps(fields).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Retry-After", "5")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *_: object) -> None:
        """Log nothing."""


for method in ("GET", "HEAD", "POST"):
    setattr(LoadingHandler, f"do_{method}", LoadingHandler.respond)


class LoadingServer(HTTPServer):
    """Answers one request after the other on a socket that listens already."""

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(listening.getsockname()[:2], LoadingHandler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening.dup()

    def handle_error(self, request: object, client_address: object) -> None:
        """Forget a client that has left."""


@contextmanager
def answering_while_loading(listening: socket.socket) -> Iterator[None]:
    """In this block a thread answers on the socket that the models are loading."""
    server = LoadingServer(listening)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
