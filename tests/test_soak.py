"""Many requests, a tenth of them cut off at random: none is lost or mixed, and nothing is left of them."""

import gc
import json
import random
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from commands import SERVED_NAME, client, count_held, serving, tiny_spec, wait_until
from models import random_prompts

OPTIONS = {"max_new_tokens": 24}
ROOM = 32 << 20  # bytes that the process may grow by in the second half of a long soak


def answers_of(spec, prompts):
    """Each prompt's own answer, alone."""
    return [spec.generate(prompt, **OPTIONS) for prompt in prompts]


def resident():
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("requests", [32, pytest.param(500, marks=pytest.mark.slow)])
def test_a_soak_over_http_gives_each_client_its_own_answer(requests):
    """32 clients; some leave mid-stream."""
    spec = tiny_spec()
    prompts = random_prompts(requests)
    wanted = [answer.text for answer in answers_of(spec, prompts)]
    before = count_held()
    with serving(spec, batch=8, queue=64) as server:

        def ask(number):
            coins = random.Random(number)
            left = coins.randrange(1, 6) if coins.random() < 0.1 else None  # events until it leaves
            body = {"model": SERVED_NAME, "prompt": prompts[number], "max_tokens": 24, "temperature": 0, "stream": True}
            parts = []
            ended = False
            with client(server) as http, http.stream("POST", "/v1/completions", json=body) as stream:
                assert stream.status_code == 200
                for line in stream.iter_lines():
                    if line == "data: [DONE]":
                        ended = True
                    elif line.startswith("data:"):
                        parts.append(json.loads(line.removeprefix("data:"))["choices"][0]["text"])
                    if left is not None and len(parts) >= left:
                        break
            return number, "".join(parts), ended

        with ThreadPoolExecutor(32) as pool:
            found = list(pool.map(ask, range(requests // 2)))
            middle = resident()
            found += pool.map(ask, range(requests // 2, requests))
        wait_until(lambda: server.engine.running == 0)
        assert resident() - middle < ROOM
    assert [number for number, _, _ in found] == list(range(requests))
    assert 0 < sum(not ended for _, _, ended in found) < 0.2 * requests
    for number, text, ended in found:
        assert text == wanted[number][: None if ended else len(text)]
    wait_until(lambda: all(now <= then for now, then in zip(count_held(), before, strict=True)))
