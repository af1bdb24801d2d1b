"""A large body is parsed beside the event loop, and a body that would take seconds is refused by its size."""

import gc
import json
import threading
import time

import pytest
from commands import MESSAGES, client, wait_until

from treespec.serve import bodies
from treespec.serve.bodies import count_openings, remove_strings

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODIES = {
    CHAT: {"messages": MESSAGES, "max_tokens": 1},
    COMPLETIONS: {"prompt": "the user", "max_tokens": 1},
    "/v1/responses": {"input": MESSAGES, "max_output_tokens": 1},
    "/tokenize": {"messages": MESSAGES},
    "/cycles": {"messages": MESSAGES, "max_tokens": 1},
}
JSON = {"Content-Type": "application/json"}


def test_others_are_answered_while_a_large_body_is_parsed(http, server, monkeypatch):
    parse = bodies.parse_body
    is_answered = threading.Event()
    answers = []

    def parse_later(*arguments):
        assert is_answered.wait(20)
        return parse(*arguments)

    def ask():
        with client(server) as other:
            for path, body in BODIES.items():
                content = json.dumps(body).encode() + b" " * bodies.LOOP_BYTES
                answers.append(other.post(path, content=content, headers=JSON).status_code)

    monkeypatch.setattr(bodies, "parse_body", parse_later)
    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(3):
        assert http.get("/health").status_code == 200
    assert answers == []
    is_answered.set()
    thread.join()
    assert answers == [200] * len(BODIES)


@pytest.mark.parametrize(
    "body, param",
    [
        ({"messages": [0] * 100_000}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "", "tool_calls": [0] * 100_000}]}, "messages[0].tool_calls[0]"),
        ({"messages": MESSAGES, "tools": [{}] * 60_000}, "tools[0].type"),
    ],
)
def test_of_many_faults_the_first_is_looked_for(http, body, param):
    began = time.monotonic()
    answer = http.post(CHAT, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert time.monotonic() - began < 5  # with all faults listed it takes a minute


def test_a_body_of_too_many_values_is_refused_unparsed(http, monkeypatch):
    monkeypatch.setattr(bodies, "MAX_JSON_VALUES", 1000)
    answer = http.post(COMPLETIONS, json={"prompt": [3] * 1000})
    assert answer.status_code == 413
    assert "1000 JSON values" in answer.json()["error"]["message"]
    text = {"prompt": '1, 2, [\\", ' * 1000, "max_tokens": 1}  # within a string there are none
    assert http.post(COMPLETIONS, json=text).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "text, count",
    [
        ('{"a": [1, 2], "b": {}}', 5),
        (r'["\\", "\",[{", "\\\"", ""]', 4),
        (r'["\\\\", 1, "a]', 3),  # broken
        ("", 0),
    ],
)
def test_values_are_counted_outside_of_strings(text, count):
    assert count_openings(remove_strings(text.encode())) == count


def test_a_refused_body_is_forgotten_with_its_answer(server, http):
    """No traceback holds it until the garbage collector comes."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            content = b'{"messages": [{"role": ["forgotten"]}' + b", {}" * 5000 + b"]}"
            assert http.post(CHAT, content=content, headers=JSON).status_code == 400
        wait_until(lambda: not server.admission.places)
        held = [value for value in gc.get_objects() if isinstance(value, dict) and value.get("role") == ["forgotten"]]
        assert held == []
    finally:
        gc.enable()
