"""What the server says of itself is so: while it loads, when its engine dies, and in its log."""

import errno
import json
import socket
import threading
from types import SimpleNamespace

import httpx
import pytest
from commands import MESSAGES, client, serving, wait_until

from treespec.cli.answer import bind_socket
from treespec.serve import run
from treespec.serve.connections import AcceptErrors
from treespec.serve.loading import answering_while_loading
from treespec.serve.options import ServeConfig

CHAT = "/v1/chat/completions"
SHORT = {"messages": MESSAGES, "max_tokens": 2}


def end(*_):
    raise SystemExit(3)


def test_while_models_load_health_is_503_and_live_200():
    with bind_socket("127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with answering_while_loading(listening), socket.create_connection(listening.getsockname()) as deaf:
            deaf.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            health = httpx.get(f"{url}/health")
            assert (health.status_code, health.json()) == (503, {"status": "loading"})
            assert httpx.get(f"{url}/live").status_code == 200
            answer = httpx.post(f"{url}{CHAT}", json=SHORT)
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
            assert httpx.head(f"{url}/health").content == b""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_engine_is_503_and_ends_the_server(tiny, monkeypatch):
    with serving(tiny, grace=60) as state, client(state) as http:
        assert http.get("/live").status_code == http.get("/health").status_code == 200
        monkeypatch.setattr("treespec.serve.run.HttpServer.should_exit", False, raising=False)
        monkeypatch.setattr("treespec.api.engine.pop_admissible", end)
        assert http.post(CHAT, json=SHORT).status_code in (500, 503)
        wait_until(lambda: state.failure)
        assert state.failure == "the engine failed: SystemExit(3)"
        wait_until(lambda: state.ending)  # long before the end of the grace period


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_whose_engine_died_fails(tiny, monkeypatch):
    monkeypatch.setattr("treespec.api.engine.pop_admissible", end)
    listening = bind_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    faults = []

    def work():
        try:
            run.serve(tiny, ServeConfig(name="tiny"), listening)
        except RuntimeError as error:
            faults.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    assert httpx.post(f"{url}{CHAT}", json=SHORT, timeout=60).status_code in (500, 503)
    thread.join(60)
    assert faults == ["the engine failed: SystemExit(3)"]


def test_a_step_that_does_not_end_is_a_failure(monkeypatch):
    monkeypatch.setattr("treespec.serve.run.MIN_STEP_SECONDS", 0.0)
    engine = SimpleNamespace(failure=None, running=1, steps=5)
    watch = run.EngineWatch(engine, 1.0)
    for _ in range(30):
        engine.steps += 1
        assert watch.find_failure() is None
    engine.running = 0
    assert [watch.find_failure() for _ in range(30)] == [None] * 30
    engine.running = 1
    faults = [watch.find_failure() for _ in range(12)]
    assert faults[:8] == [None] * 8
    assert faults[-1] == "the engine hangs: a step takes longer than 1 s"


def test_the_log_names_each_request_as_its_answer_does(tiny, capsys):
    with serving(tiny, log_json=True) as state, client(state) as http:
        named = http.post(CHAT, json=SHORT, headers={"x-request-id": "mine"})
        others = [http.get("/health"), http.get("/nothing"), http.post(CHAT, json={})]
        with pytest.raises(httpx.TimeoutException):
            http.post(CHAT, json=SHORT | {"max_tokens": 4000}, timeout=0.1)
        wait_until(lambda: not state.admission.places)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    lines = [line for line in lines if "path" in line]
    assert named.headers["x-request-id"] == lines[0]["request_id"] == "mine"
    assert [line["status"] for line in lines] == [200, 200, 404, 400, 499]
    assert [answer.headers["x-request-id"] for answer in others] == [line["request_id"] for line in lines[1:4]]
    assert lines[0]["time"].endswith("Z")
    assert (lines[0]["path"], lines[0]["client"]) == (CHAT, "127.0.0.1")
    assert lines[4]["seconds"] >= 0.1


def test_a_line_of_the_log_has_a_time(tiny, capsys):
    with serving(tiny, log=True) as state, client(state) as http:
        assert len(http.get("/health", headers={"x-request-id": "bad id"}).headers["x-request-id"]) > 20
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "/health" in line]
    assert line[:2] == "20"
    assert "Z info 127.0.0.1 GET /health 200 0." in line
    assert "[req-" in line


def test_without_descriptors_the_log_gets_a_line_now_and_then(caplog):
    loop = SimpleNamespace(time=lambda: now)
    handler = AcceptErrors()
    for second in range(1000):
        now = second / 100
        handler(loop, {"exception": OSError(errno.EMFILE, "Too many open files")})
    assert len(caplog.records) == 1
    assert "no further connection can be accepted now: Too many open files" in caplog.text
