"""A server that ends finishes what runs, or tells that it was cut off; it starts and ends by the command line."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import fields
from pathlib import Path

import httpx
import pytest
from commands import MESSAGES, client, complains, serving, treespec, wait_until
from training import save_model

from treespec.cli.answer import bind_socket
from treespec.serve.options import ServeConfig

LONG = {"messages": MESSAGES, "max_tokens": 4000, "temperature": 0, "stream": True}


def events(stream):
    return [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]


def said(chunks):
    return "".join(json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks)


def test_running_streams_finish_and_new_requests_are_refused(tiny):
    body = {"messages": MESSAGES, "max_tokens": 150, "seed": 5, "stream": True}
    before = threading.active_count()
    with serving(tiny, grace=60) as state, client(state) as http, client(state) as other:
        assert other.get("/health").status_code == 200  # its connection stays open
        with http.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = stream.iter_lines()
            first = next(line for line in lines if line.startswith("data: "))
            state.server.should_exit = True
            wait_until(lambda: state.ending)
            with pytest.raises(httpx.TransportError):  # it listens no more
                httpx.post(f"{state.url}/v1/chat/completions", json=body)
            rest = [line[6:] for line in lines if line.startswith("data: ")]
    assert rest[-1] == "[DONE]"
    wanted = tiny.generate(MESSAGES, seed=5, temperature=1.0, max_new_tokens=150).text
    assert said([first[6:], *rest[:-1]]) == wanted
    wait_until(lambda: threading.active_count() <= before + 2)  # idle workers of the thread pool may stay


def test_requests_longer_than_the_grace_period_are_told_of_their_end(tiny):
    path = "/v1/chat/completions"
    with serving(tiny, grace=0.2) as state, client(state) as http, http.stream("POST", path, json=LONG) as stream:
        wait_until(lambda: state.engine.running)
        state.server.should_exit = True
        *_, last, done = events(stream)
    assert json.loads(last)["error"]["message"] == "the server shuts down"
    assert done == "[DONE]"


def half(state, body=b"{"):
    """A connection that has sent half of a request."""
    made = socket.create_connection(state.server.servers[0].sockets[0].getsockname())
    made.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
    if body:
        made.sendall(b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n" + body)
    return made


@pytest.mark.parametrize("body", [b"", b"{"])
def test_half_a_request_does_not_keep_the_server(tiny, body):
    with serving(tiny, grace=60) as state:
        wait_until(lambda: state.server.started)
        with half(state, body):
            wait_until(lambda: state.server.server_state.connections)
            begun = time.monotonic()
            state.server.should_exit = True
            wait_until(lambda: state.cut_off or not state.server.server_state.connections)
    assert time.monotonic() - begun < 10


def test_a_client_that_does_not_read_does_not_keep_the_server(tiny):
    asked = {"prompt": "a", "max_tokens": 4000, "temperature": 0, "logprobs": 20, "n": 4, "stream": True}
    body = json.dumps(asked).encode()
    with serving(tiny, grace=0.2) as state:
        wait_until(lambda: state.server.started)
        small = socket.SOL_SOCKET, socket.SO_SNDBUF, 1  # as small as there is; accepted connections have it too
        state.server.servers[0].sockets[0].setsockopt(*small)
        with half(state, b"") as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            deaf.sendall(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: state.engine.running)
            (connection,) = state.server.server_state.connections
            wait_until(lambda: connection.transport.get_write_buffer_size() > 1 << 16)  # asyncio writes no more
            begun = time.monotonic()
            state.server.should_exit = True
            wait_until(lambda: state.cut_off and not state.server.server_state.connections)
    assert time.monotonic() - begun < 10


def test_a_request_that_does_not_arrive_is_closed(tiny, monkeypatch):
    monkeypatch.setattr("treespec.serve.connections.ARRIVAL_SECONDS", 0.3)
    with serving(tiny) as state, client(state) as http:
        wait_until(lambda: state.server.started)
        for body in (b"", b"{"):
            with half(state, body) as made:
                made.settimeout(20)
                assert made.recv(100).startswith(b"HTTP/1.1 408 ")
        answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 200, "ignore_eos": True})
        assert answer.status_code == 200  # the time of an answer is another


def test_connections_without_a_request_give_way_to_new_ones(tiny, monkeypatch):
    """An upload that is under way is none of them, however old it is."""
    monkeypatch.setattr("treespec.serve.run.count_connections", lambda: 20)
    body = json.dumps({"prompt": "the user", "max_tokens": 2}).encode()
    with serving(tiny) as state, client(state) as http, ExitStack() as opened:
        wait_until(lambda: state.server.started)
        upload = opened.enter_context(half(state, b""))
        upload.sendall(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:5])
        wait_until(lambda: state.admission.places)
        made = [opened.enter_context(half(state, b"")) for _ in range(60)]
        assert http.get("/health").status_code == 200
        assert len(state.server.server_state.connections) <= 20
        made[0].settimeout(20)
        with suppress(ConnectionResetError):
            assert made[0].recv(100) == b""
        upload.sendall(body[5:])
        upload.settimeout(20)
        assert upload.recv(100).startswith(b"HTTP/1.1 200 ")


def test_without_the_packages_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # fschat brings fastapi and uvicorn
    assert treespec("serve --target nowhere") == 2
    assert capsys.readouterr().err == "treespec: the server needs prometheus-client: pip install prometheus-client\n"


def test_an_address_that_is_taken_is_told():
    with bind_socket("127.0.0.1", 0) as taken, complains(r"cannot listen on .*--host and --port"):
        bind_socket("127.0.0.1", taken.getsockname()[1])


@pytest.mark.slow
def test_the_command_serves_until_a_signal(tmp_path):
    save_model(tmp_path / "target")
    line = ["serve", "--target", f"{tmp_path}/target", "--drafter", "suffix", "--port", "0", "--name", "mine"]
    code = "from treespec.cli import main; main()"
    environment = os.environ | {"TREESPEC_API_KEY": "secret"}
    with subprocess.Popen(
        [sys.executable, "-c", code, *line], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        told = process.stdout.readline()
        url = told.split()[2].removesuffix("/v1,")
        with httpx.Client(base_url=url, timeout=60, headers={"Authorization": "Bearer secret"}) as http:
            assert http.get("/v1/models").json()["data"][0]["id"] == "mine"
            body = {"model": "mine", "prompt": "the user", "max_tokens": 3}
            assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] <= 3
        assert httpx.get(f"{url}/v1/models").status_code == 401
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.parametrize("file", ["Dockerfile", "treespec.service"])
def test_the_examples_start_the_server_with_options_it_has(file):
    text = (Path(__file__).parent.parent / "docs/examples/serve" / file).read_text(encoding="utf-8")
    words = re.findall(r'treespec"?,? "?serve"?,?([^\n\]]*)', text)[-1].replace('"', "").replace(",", "").split()
    assert words
    named = dict(zip(words[::2], words[1::2], strict=True))
    known = {f"--{field.name.replace('_', '-')}" for field in fields(ServeConfig)}
    assert named.keys() <= known
