"""Nothing that one caller does makes another wait for more than its turn; what clients leave behind is dropped."""

import asyncio
import json
import socket
import threading
import time

import pytest
from commands import MESSAGES, client, serving, tiny_spec, wait_until

from treespec.serve.admission import Lane

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SHORT = {"messages": MESSAGES, "max_tokens": 2}
KEYS = ["a", "b"]
HEAVY_GRAMMAR = {"regex": "(a|b)*a(a|b){14}c"}


@pytest.fixture(scope="module")
def wide():
    """A target whose context may hold the texts below, by their length."""
    return tiny_spec(context=40_000, eos=2)


@pytest.fixture(scope="module")
def keyed(wide):
    with serving(wide, api_key=KEYS, batch=2, queue=60) as state:
        yield state


def to_headers(key):
    return {"Authorization": f"Bearer {key}"}


def leave(state, path, body, key="a"):
    """Send a request, and leave without its answer."""
    content = json.dumps(body).encode()
    with socket.create_connection(state.server.servers[0].sockets[0].getsockname()) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)


def count_workers():
    return sum(thread.name == "treespec-request" for thread in threading.enumerate())


def is_idle(state):
    return not (state.admission.places or state.admission.held or count_workers() or state.engine.running)


BOMBS = {
    "text": (CHAT, {"messages": [{"role": "user", "content": "the user asks a question " * 12_000}]}),
    "grammar": (CHAT, SHORT | HEAVY_GRAMMAR),
    "tokens": (COMPLETIONS, {"prompt": [3] * 100_000, "max_tokens": 9}),
    "scores": (COMPLETIONS, {"prompt": [3] * 3000, "max_tokens": 0, "echo": True, "logprobs": 1}),
    "answers": (CHAT, {"messages": MESSAGES, "max_tokens": 4000, "n": 4}),
    "page": ("/cycles", {"messages": MESSAGES, "max_tokens": 4096, "tree": "chain:5"}),
}


@pytest.mark.parametrize("name", BOMBS)
def test_forty_requests_that_were_left_hold_nobody_up(keyed, name):
    """And leave nothing behind: no place, thread or answer."""
    wait_until(lambda: keyed.server.started)
    with client(keyed, headers=to_headers("b")) as http:
        assert http.post(CHAT, json=SHORT).status_code == 200
        for _ in range(40):
            leave(keyed, *BOMBS[name])
        began = time.monotonic()
        assert http.post(CHAT, json=SHORT).status_code == 200
        assert time.monotonic() - began < 5  # one after the other they take minutes
        wait_until(lambda: is_idle(keyed))


def test_another_key_waits_for_one_answer_though_sixty_wait(wide):
    body = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0}
    with serving(wide, api_key=KEYS, batch=2, queue=60) as state:
        done = []

        def ask(key, number):
            with client(state, headers=to_headers(key)) as http:
                answer = http.post(CHAT, json=body)
            assert answer.status_code == 200
            done.append((key, number))

        threads = [threading.Thread(target=ask, args=("a", number)) for number in range(24)]
        for thread in threads:
            thread.start()
        wait_until(lambda: state.engine.waiting > 15)
        before = len(done)
        ask("b", 0)
        assert done.index(("b", 0)) <= before + 6  # the two that ran, its neighbour in the batch, and the network
        for thread in threads:
            thread.join()


def test_the_bound_is_of_each_key(wide):
    long = {"messages": MESSAGES, "max_tokens": 4000, "temperature": 0, "stream": True}
    with serving(wide, api_key=KEYS, batch=1, queue=1) as state, client(state) as http:
        with http.stream("POST", CHAT, json=long | {"n": 2}, headers=to_headers("a")) as stream:
            lines = stream.iter_lines()  # the stream ends with it
            next(lines)
            refused = http.post(CHAT, json=SHORT, headers=to_headers("a"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert int(refused.headers["Retry-After"]) >= 1
            with http.stream("POST", CHAT, json=long, headers=to_headers("b")) as other:
                assert other.status_code == 200
        wait_until(lambda: is_idle(state))
        assert http.post(CHAT, json=SHORT, headers=to_headers("a")).status_code == 200


def test_a_text_that_is_tokenised_ends_with_the_grace_period(wide, monkeypatch):
    monkeypatch.setattr("treespec.text.pieces.PIECE_CHARACTERS", 60)
    monkeypatch.setattr("treespec.text.pieces.OVERLAP_CHARACTERS", 30)
    body = {"messages": [{"role": "user", "content": "the user asks a question " * 14_000}]}
    answers = []
    with serving(wide, grace=0.1) as state:

        def ask():
            with client(state) as http:
                answers.append(http.post(CHAT, json=body))

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(count_workers)
        began = time.monotonic()
        state.server.should_exit = True
        thread.join()
        wait_until(lambda: not state.server.server_state.connections)
        assert time.monotonic() - began < 3
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["message"] == "the server shuts down"


def test_a_key_with_a_refused_grammar_goes_behind_the_others():
    async def run():
        lane = Lane(1)
        order = []
        await lane.enter("first")
        lane.put_behind("a")

        async def work(caller):
            await lane.enter(caller)
            order.append(caller)
            lane.leave(caller)

        tasks = [asyncio.create_task(work(caller)) for caller in ("a", "a", "b", "c", "b")]
        await asyncio.sleep(0)
        lane.leave("first")
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(run()) == ["b", "c", "b", "a", "a"]


def test_callers_take_turns_in_a_lane_and_one_is_in_it_once():
    """As `Lane` draws it; who leaves while waiting, or at the moment of the turn, gives the turn on."""

    async def run():
        lane = Lane(2)
        works = []

        async def work(name):
            await lane.enter(name[0])
            works.append(name)

        async def settle():
            for _ in range(3):
                await asyncio.sleep(0)
            return " ".join(works)

        tasks = {name: asyncio.create_task(work(name)) for name in ("a1", "a2", "a3", "b1", "c1")}
        drawn = [await settle()]
        for caller, name in (("a", "a1"), ("b", "b1")):
            lane.leave(caller)
            works.remove(name)
            drawn.append(await settle())
        tasks["a3"].cancel()
        lane.leave("a")
        tasks["d1"] = asyncio.create_task(work("d1"))
        drawn.append(await settle())
        lane.leave("c")
        lane.leave("d")
        assert (lane._free, lane.has_waiting) == (2, False)
        return drawn

    assert asyncio.run(run()) == ["a1 b1", "b1 c1", "c1 a2", "c1 a2 d1"]


def test_a_trial_that_cannot_start_is_a_503_in_words(wide, monkeypatch):
    def refuse(*_):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("multiprocessing.context.SpawnProcess.start", refuse)
    with serving(wide) as state, client(state) as http:
        answer = http.post(CHAT, json=SHORT | {"regex": "a+"})
        assert answer.status_code == 503
        assert "cannot start (Resource temporarily unavailable)" in answer.json()["error"]["message"]
        assert http.post(CHAT, json=SHORT).status_code == 200


def test_log_probabilities_are_counted_before_they_are_computed(keyed, monkeypatch):
    """Of prompts that are scored, too."""
    monkeypatch.setitem(keyed.admission.limits, "log-probabilities", 50)
    chat = SHORT | {"n": 2, "logprobs": True}
    echo = {"prompt": [3] * 9, "echo": True, "max_tokens": 0}
    with client(keyed, headers=to_headers("a")) as http:
        for path, body, status in (
            (CHAT, chat | {"top_logprobs": 12}, 400),
            (CHAT, chat | {"top_logprobs": 11}, 200),
            (COMPLETIONS, echo | {"logprobs": 5}, 400),
            (COMPLETIONS, echo | {"logprobs": 4}, 200),
        ):
            wait_until(lambda: is_idle(keyed))
            answer = http.post(path, json=body)
            assert answer.status_code == status
            assert status == 200 or "log-probabilities" in answer.json()["error"]["message"]
