"""A server that ends finishes what runs, or tells that it was cut off; it starts and ends by the command line."""

import json
import os
import signal
import subprocess
import sys
import threading

import httpx
import pytest
from http_serving import MESSAGES, client, serving, tiny_spec, until
from models import save_model

from treespec.cli import app
from treespec.cli.entry import run
from treespec.errors import InputError
from treespec.serve.run import bound

LONG = {"messages": MESSAGES, "max_tokens": 4000, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def spec():
    return tiny_spec(context=4200)


def events(stream):
    return [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]


def said(chunks):
    return "".join(json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks)


def test_running_streams_finish_and_new_requests_are_refused(spec):
    body = {"messages": MESSAGES, "max_tokens": 150, "seed": 5, "stream": True}
    before = threading.active_count()
    with serving(spec, grace=60) as state, client(state) as http, client(state) as other:
        assert other.get("/health").status_code == 200  # its connection stays open
        with http.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = stream.iter_lines()
            first = next(line for line in lines if line.startswith("data: "))
            state.server.should_exit = True
            until(lambda: state.ending)
            with pytest.raises(httpx.TransportError):  # it listens no more
                httpx.post(f"{state.url}/v1/chat/completions", json=body)
            rest = [line[6:] for line in lines if line.startswith("data: ")]
    assert rest[-1] == "[DONE]"
    wanted = spec.generate(MESSAGES, seed=5, temperature=1.0, max_new_tokens=150).text
    assert said([first[6:], *rest[:-1]]) == wanted
    until(lambda: threading.active_count() <= before + 2)  # idle workers of the thread pool may stay


def test_what_runs_longer_than_the_grace_is_told_that_it_was_cut_off(spec):
    path = "/v1/chat/completions"
    with serving(spec, grace=0.2) as state, client(state) as http, http.stream("POST", path, json=LONG) as stream:
        until(lambda: state.engine.running)
        state.server.should_exit = True
        *_, last, done = events(stream)
    assert json.loads(last)["error"]["message"] == "the server shuts down"
    assert done == "[DONE]"


def test_without_the_packages_one_line_says_what_to_install(monkeypatch, capsys):
    command = sys.modules["treespec.cli.serve"]
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "uvicorn" else name)
    assert run(app, ["serve", "--target", "nowhere"]) == 2
    assert capsys.readouterr().err == "treespec: the server needs uvicorn: pip install 'treespec[serve]'\n"


def test_what_is_no_origin_is_told_before_anything_is_loaded(capsys):
    for wrong in ("localhost:3000", "http://localhost:3000/page", "", "://"):
        assert run(app, ["serve", "--target", "nowhere", "--cors", wrong]) == 2
        assert "must be an origin such as http://localhost:3000" in capsys.readouterr().err


def test_every_kind_of_origin_that_a_browser_sends_is_taken(capsys):
    for origin in ("*", "https://page.example:8443", "chrome-extension://abcdef", "tauri://localhost", "null"):
        assert run(app, ["serve", "--target", "./nowhere", "--cors", origin]) == 2
        assert "no target directory" in capsys.readouterr().err


def test_an_empty_key_is_refused_before_anything_is_loaded(capsys):
    """Such as that of a shell variable that is not set: the server would answer nobody."""
    for wrong in ("", " "):
        assert run(app, ["serve", "--target", "nowhere", "--api-key", "one", "--api-key", wrong]) == 2
        assert "--api-key is empty" in capsys.readouterr().err


def test_an_address_that_is_taken_is_told():
    with bound("127.0.0.1", 0) as taken, pytest.raises(InputError, match=r"cannot listen on .*--host and --port"):
        bound("127.0.0.1", taken.getsockname()[1])


@pytest.mark.slow
def test_the_command_serves_until_a_signal(tmp_path):
    save_model(tmp_path / "target")
    line = ["serve", "--target", str(tmp_path / "target"), "--drafter", "lookup", "--port", "0", "--name", "mine"]
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
