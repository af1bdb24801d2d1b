"""Regeneration by a server: every conversation is answered once, whatever goes wrong for a while."""

import json
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from commands import FakeServer, answer_in_capitals, complains
from training import read_lines, read_rows, regenerate_config, write_question_data

from treespec.train.regenerate import ask
from treespec.train.regenerate.run import LEFT_OUT_FILE, regenerate_answers


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(ask, "RETRY_PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with FakeServer() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def config(server, tmp_path):
    data = write_question_data(tmp_path / "data.jsonl")
    return regenerate_config("the-model", data, tmp_path / "out", endpoint=server.url, greedy=0.5)


def test_a_server_answers_turn_by_turn_with_a_seed_for_each(server, config):
    result = regenerate_answers(config)
    assert (result.conversations, result.tokens) == (12, 3 * len(server.requests))
    for line in read_lines(config):
        asked = line["messages"][::2]
        answers = line["messages"][1::2]
        assert [answer["content"] for answer in answers] == [question["content"].upper() for question in asked]
        assert line["ended"] == ["model"] * len(answers)
    for path, key, body in server.requests:
        assert (path, key, body["model"]) == ("/v1/chat/completions", "Bearer secret", "the-model")
        assert [message["role"] for message in body["messages"]][-1] == "user"
    assert {body["temperature"] for _, _, body in server.requests} == {0.0, 1.0}
    assert len({body["seed"] for _, _, body in server.requests}) == len(server.requests)
    assert Counter(len(body["messages"]) for _, _, body in server.requests) == {1: 12, 3: 8}


def test_temporary_failures_are_retried_and_the_key_is_written_nowhere(server, config):
    server.troubles = {0: 503, 2: 429, 4: "hang up", 6: "hang up"}
    regenerate_answers(config)
    assert len(read_rows(config)) == 12
    for file in Path(config.out).iterdir():
        assert b"secret" not in file.read_bytes(), file
    with complains("answers_by = 'a server', not 'the target'"):
        regenerate_answers(replace(config, target=str(Path(config.out)), endpoint=None))


def test_a_conversation_that_the_server_refuses_is_left_out(server, config):
    server.troubles = {1: 400}
    result = regenerate_answers(replace(config, batch=1))
    assert result.conversations == 11
    (line,) = read_lines(config, LEFT_OUT_FILE)
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
def test_a_server_that_keeps_failing_ends_the_run_with_its_rows(server, config, trouble, said):
    server.troubles = trouble
    with complains(said):
        regenerate_answers(replace(config, batch=1))
    before = read_rows(config)
    assert 0 < len(before) < 12
    server.troubles, count = {}, len(server.requests)
    regenerate_answers(config)
    ended = [line["messages"][0] for line in before.values()]
    assert not any(body["messages"][0] in ended for _, _, body in server.requests[count:])
    assert len(read_rows(config)) == 12
    assert before.items() <= read_rows(config).items()


def thinking(body, **more):
    """As vLLM and SGLang stream an answer with thoughts, here token by token; with ids where they are asked for."""
    chunks = [{"prompt_token_ids": [1, 4], "choices": [{"delta": {"role": "assistant", "content": ""}}]}]
    words = [("reasoning_content", "why "), ("reasoning", "not"), ("content", "THE "), ("content", "SEA")]
    for token, (name, word) in enumerate(words, 5):
        chunks.append({"choices": [{"delta": {name: word}, "token_ids": [token]}]})
    chunks.append({"choices": [{"delta": {}, "finish_reason": "stop", "token_ids": [2]}]})
    chunks.append({"choices": [], "usage": {"completion_tokens": 5, **more}})
    if not body.get("return_token_ids"):
        chunks[0].pop("prompt_token_ids")
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            choice.pop("token_ids", None)
    return chunks


def without_ids(body):
    return thinking(body | {"return_token_ids": False})


def test_thoughts_that_a_server_tells_apart_are_kept_and_not_sent_back(server, config):
    server.answer = without_ids
    regenerate_answers(config)
    answer = {"role": "assistant", "content": "THE SEA", "reasoning_content": "why not"}
    for line in read_lines(config):
        assert line["messages"][1::2] == [answer] * len(line["tokens"])
        assert "input_ids" not in line
    assert {tuple(message) for _, _, body in server.requests for message in body["messages"]} == {("role", "content")}


def test_token_ids_that_a_server_tells_are_the_row_of_an_answer(server, config):
    server.answer = thinking
    regenerate_answers(config)
    assert all(body["return_token_ids"] for _, _, body in server.requests)
    for line in read_lines(config):
        count = len(line["tokens"])
        assert line["input_ids"] == [[1, 4, 5, 6, 7, 8, 2]] * count
        assert line["loss_mask"] == [[0, 0, 1, 1, 1, 1, 1]] * count


def test_token_ids_that_are_not_all_of_an_answers_are_left_out(server, config):
    server.answer = lambda body: thinking(body, completion_tokens=6)
    regenerate_answers(config)
    assert not any("input_ids" in line for line in read_lines(config))


def test_a_server_that_refuses_token_ids_is_asked_without_them(server, config):
    def strict(body):
        return (400, "unknown field return_token_ids") if "return_token_ids" in body else answer_in_capitals(body)

    server.answer = strict
    assert regenerate_answers(replace(config, batch=1)).conversations == 12
    asked = ["return_token_ids" in body for _, _, body in server.requests]
    assert asked == [True] + [False] * (len(asked) - 1)


def test_an_answer_whose_thoughts_the_server_hides_is_left_out(server, config):
    hidden = {"completion_tokens_details": {"reasoning_tokens": 40}}
    server.answer = lambda body: [chunk | {"usage": hidden} for chunk in answer_in_capitals(body)]
    assert regenerate_answers(config).left_out == {"the server does not tell the thoughts of an answer": 12}


def test_a_developers_message_is_asked_as_one(server, config, tmp_path):
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "why"}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": messages}))
    regenerate_answers(config)
    assert server.requests[0][2]["messages"] == messages
