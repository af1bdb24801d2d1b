"""What cannot be asked is refused by OpenAI's statuses, with the field's name, and takes nobody along."""

import json
import socket
import time

import pytest
from commands import MESSAGES, client, serving, tiny_spec, wait_until
from fastapi import Request

from treespec.serve.guard import is_named_rightly

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = {"Content-Type": "application/json"}
LONG = {"messages": MESSAGES, "max_tokens": 4000, "temperature": 0}
FIELDS = [  # of a chat's request, each wrong by itself
    ("temperature", "0"),
    ("temperature", True),
    ("top_p", 0),
    ("max_completion_tokens", 0),
    ("n", 65),
    ("stop", 4),
    ("stream", "yes"),
    ("logit_bias", {"a": 1}),
    ("top_logprobs", 2),
    ("temprature", 0),
    ("modalities", ["text", "audio"]),
    ("parallel_tool_calls", 1),
    ("logit_bias", {"\ud800": "a"}),
    ("chat_template_kwargs", {"tokenize": 1}),
    ("tool_choice", {"type": "function", "function": "x"}),
    ("regex", "\ud800"),
]
BAD = [  # path, body, param
    *((CHAT, {"messages": MESSAGES, name: value}, name) for name, value in FIELDS),
    (CHAT, {}, "messages"),
    (CHAT, [], None),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [*MESSAGES, {"role": "usr", "content": "a"}]}, "messages[1].role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 5000}]}, "messages"),
    (CHAT, {"messages": MESSAGES, "model": "another"}, "model"),
    (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"messages": MESSAGES, "\ud800": 1}, "\N{REPLACEMENT CHARACTER}"),
    ("/tokenize", {"prompt": "a", "add_special_token": True}, "add_special_token"),
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": [3, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [3, 100000]}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of"),
    ("/nothing", {}, None),
]


def ask(http, **more):
    return http.post(CHAT, json={"messages": MESSAGES} | more)


@pytest.mark.parametrize("path, body, param", BAD)
def test_a_bad_request_names_its_field(http, path, body, param):
    answer = http.post(path, content=json.dumps(body), headers=JSON)
    error = answer.json()["error"]
    status = 404 if param == "model" or path == "/nothing" else 400
    assert (answer.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_what_is_no_json_is_refused(http):
    for content, kind in ((b"{", "application/json"), (b"{}", "text/plain"), (b"\xff", "application/json")):
        answer = http.post(CHAT, content=content, headers={"Content-Type": kind})
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_what_changes_no_answer_is_taken_and_null_is_absent(http):
    harmless = {"user": "me", "metadata": {"a": 1}, "store": False, "service_tier": "auto", "prediction": {}}
    default = {"modalities": ["text"], "parallel_tool_calls": True, "stop": None, "n": None, "functions": None}
    answers = [ask(http, max_tokens=2, seed=1, **more).json() for more in ({}, harmless | default)]
    assert answers[0]["choices"] == answers[1]["choices"]


@pytest.mark.parametrize(
    "body, code, words",
    [
        ({"temprature": 1}, "unknown_parameter", "did you mean temperature?"),
        ({"max_new_tokens": 1}, "unknown_parameter", "max_tokens"),
        ({"model": "another"}, "model_not_found", "another"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "context_length_exceeded", ""),
    ],
)
def test_error_codes_are_openais_and_unknown_fields_name_the_nearest(http, body, code, words):
    error = ask(http, **body).json()["error"]
    assert error["code"] == code
    assert words in error["message"]


def test_a_failing_request_takes_no_others_along(http, tiny):
    wanted = tiny.generate(MESSAGES, seed=1, temperature=1.0, max_new_tokens=60).text
    body = {"messages": MESSAGES, "seed": 1, "max_tokens": 60, "stream": True}
    said = ""
    with http.stream("POST", CHAT, json=body) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                said += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
            if len(said) < 10:
                path, bad, _ = BAD[len(said)]
                assert http.post(path, content=json.dumps(bad), headers=JSON).status_code == 400
    assert said == wanted


def test_a_full_queue_is_429_and_says_when_to_come_back(tiny):
    with serving(tiny, batch=1, queue=0) as state, client(state) as http:
        with http.stream("POST", CHAT, json=LONG | {"stream": True}) as stream:
            lines = stream.iter_lines()  # the stream ends with it
            next(lines)
            answer = http.post(CHAT, json=LONG)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(answer.headers["Retry-After"]) >= 1
        wait_until(lambda: not state.engine.running)
        assert ask(http, max_tokens=2).status_code == 200
        assert ask(http, n=2).json()["error"]["param"] == "n"


def test_an_answer_that_takes_too_long_is_cut_off(tiny):
    with serving(tiny, timeout=0.3) as state, client(state) as http:
        started = time.monotonic()
        answer = http.post(CHAT, json=LONG)
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "server_error")
        with http.stream("POST", CHAT, json=LONG | {"stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert "limit of 0.3 s" in json.loads(lines[-2][6:])["error"]["message"]
        assert lines[-1] == "data: [DONE]"
        assert time.monotonic() - started < 10
        wait_until(lambda: not state.engine.running)


def test_a_server_of_this_machine_answers_to_its_names_alone(http):
    """A page elsewhere may lead a name of its own here; the browser would let it read the answer."""
    own = ("localhost", "127.0.0.1:80", "[::1]:80", "LOCALHOST:80")
    others = ("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example")
    statuses = [http.get("/v1/models", headers={"Host": host}).status_code for host in (*own, *others)]
    assert statuses == [200] * 4 + [403] * 4


@pytest.mark.parametrize(
    "host, passes",
    {
        "192.0.2.7:8000": True,
        "localhost:8000": True,
        socket.gethostname().upper(): True,
        "evil.example": False,
        "192.0.2.7.evil.example": False,
        "": False,
    }.items(),
)
def test_a_public_address_answers_to_addresses_and_the_machines_name(host, passes):
    scope = {"type": "http", "server": ("192.0.2.7", 8000), "headers": [(b"host", host.encode())]}
    assert is_named_rightly(Request(scope)) is passes


def test_a_key_guards_all_but_the_page_and_health(tiny):
    with serving(tiny, api_key=["sésame"]) as state, client(state) as http:
        body = {"messages": MESSAGES, "max_tokens": 2}
        for key in (None, "Bearer wrong", "Bearer", "Basic sésame"):
            headers = {"Authorization": key.encode()} if key else {}
            for path in (CHAT, COMPLETIONS, "/tokenize", "/cycles"):
                answer = http.post(path, json=body, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert {http.get(path, headers=headers).status_code for path in ("/v1/models", "/metrics")} == {401}
        for host in ("a/health?", "a/health#", "a/?"):  # paths are not read off the Host header
            assert http.post(CHAT, json=body, headers={"Host": host}).status_code in (400, 401)
        assert http.get("/health").status_code == http.get("/").status_code == 200
        assert http.post(CHAT, json=body, headers={"Authorization": "Bearer sésame".encode()}).status_code == 200


def test_a_large_body_is_refused_whatever_its_headers_say(tiny, monkeypatch):
    monkeypatch.setattr("treespec.serve.guard.MAX_BODY_BYTES", 2000)
    with serving(tiny) as state, client(state) as http:
        body = json.dumps({"messages": [{"role": "user", "content": "a" * 4000}]}).encode()
        headers = {"Content-Type": "application/json"}
        assert http.post(CHAT, content=body, headers=headers).status_code == 413
        parts = (body[at : at + 500] for at in range(0, len(body), 500))  # sent without a length
        answer = http.post(CHAT, content=parts, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
        assert ask(http, max_tokens=2).status_code == 200


def test_pages_of_other_origins_may_not_call_unless_told(http, tiny):
    asked = {"Origin": "http://other.example", "Access-Control-Request-Method": "POST"}
    allowed = "access-control-allow-origin"
    assert http.options(CHAT, headers=asked).status_code == 405
    assert allowed not in http.get("/v1/models", headers=asked).headers
    with serving(tiny, cors=["http://other.example"]) as state, client(state) as other:
        assert other.options(CHAT, headers=asked).headers[allowed] == "http://other.example"
        assert allowed not in other.get("/v1/models", headers={"Origin": "http://third.example"}).headers


def test_without_a_limit_memory_bounds_an_answer_and_prompt_limits_are_named(tiny):
    with serving(tiny, columns=40, max_prompt=16) as state, client(state) as http:
        assert ask(http).json()["usage"]["total_tokens"] == 40
        assert ask(http, max_tokens=41).json()["usage"]["total_tokens"] == 40
        answer = http.post(COMPLETIONS, json={"prompt": [3] * 17})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert http.post(COMPLETIONS, json={"prompt": [3] * 16, "max_tokens": 1}).status_code == 200


def test_a_text_that_cannot_fit_is_refused_by_length_before_tokenizing():
    """2 MB take a second and half a gigabyte to tokenise; here one answer takes the time of its JSON."""
    with serving(tiny_spec(context=2048), timeout=1.0) as state, client(state) as http:
        text = "the user asks " * 150_000
        bodies = {CHAT: {"messages": [{"role": "user", "content": text}]}, "/tokenize": {"prompt": text}}
        for path, body in (bodies | {COMPLETIONS: {"prompt": text}}).items():
            began = time.monotonic()
            error = http.post(path, json=body).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "characters" in error["message"]
            assert time.monotonic() - began < 0.8

        # The deadline holds for those that wait to be tokenised, too.
        state.admission.texts._free = 0
        assert http.post(COMPLETIONS, json={"prompt": "the user"}).status_code == 504
