"""Regeneration by a server: every conversation is answered once, whatever goes wrong for a while."""

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import complains
from regenerating import Server, by_row, config_for, lines_of, write_questions

from treespec.train.regenerate import ask
from treespec.train.regenerate.run import LEFT_OUT, regenerate


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(ask, "PAUSE", 0.01)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def config(server, tmp_path):
    data = write_questions(tmp_path / "data.jsonl")
    return config_for("the-model", data, tmp_path / "out", endpoint=server.url, greedy=0.5)


def test_a_server_answers_turn_by_turn_with_a_seed_for_each(server, config):
    result = regenerate(config)
    assert (result.conversations, result.tokens) == (12, 3 * len(server.requests))
    for line in lines_of(config):
        asked, answers = line["messages"][::2], line["messages"][1::2]
        assert [answer["content"] for answer in answers] == [question["content"].upper() for question in asked]
        assert line["ended"] == ["model"] * len(answers)
    for path, key, body in server.requests:
        assert (path, key, body["model"]) == ("/v1/chat/completions", "Bearer secret", "the-model")
        assert [message["role"] for message in body["messages"]][-1] == "user"
    assert {body["temperature"] for _, _, body in server.requests} == {0.0, 1.0}
    assert len({body["seed"] for _, _, body in server.requests}) == len(server.requests)
    assert Counter(len(body["messages"]) for _, _, body in server.requests) == {1: 12, 3: 8}


def test_what_fails_for_a_while_is_asked_again_and_the_key_is_written_nowhere(server, config):
    server.troubles = {0: 503, 2: 429, 4: "hang up", 6: "hang up"}
    regenerate(config)
    assert len(by_row(config)) == 12
    for file in Path(config.out).iterdir():
        assert b"secret" not in file.read_bytes(), file
    with complains("answers_by = 'a server', not 'the target'"):
        regenerate(replace(config, target=str(Path(config.out)), endpoint=None))


def test_a_conversation_that_the_server_refuses_is_left_out(server, config):
    server.troubles = {0: 400}
    result = regenerate(replace(config, batch=1))
    assert result.conversations == 11
    (line,) = lines_of(config, LEFT_OUT)
    assert line["problem"].startswith("refused: the server refuses with HTTP 400")


@pytest.mark.parametrize(
    "said, trouble",
    {
        "the server refuses with HTTP 401.*OPENAI_API_KEY": {6: 401},
        "the server refuses with HTTP 404": {6: 404},
        "answers with no chat completion": {6: {"error": "x"}},
        "refuses with HTTP 500.*repeat the command": dict.fromkeys(range(6, 99), 500),
    }.items(),
)
def test_a_server_that_fails_for_good_ends_the_run_and_keeps_its_rows(server, config, trouble, said):
    server.troubles = trouble
    with complains(said):
        regenerate(replace(config, batch=1))
    before = by_row(config)
    assert 0 < len(before) < 12
    server.troubles, count = {}, len(server.requests)
    regenerate(config)
    ended = [line["messages"][0] for line in before.values()]
    assert not any(body["messages"][0] in ended for _, _, body in server.requests[count:])
    assert len(by_row(config)) == 12
    assert before.items() <= by_row(config).items()
