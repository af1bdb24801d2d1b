"""The server answers as the Python call does; OpenAI's client, unchanged."""

import json

import httpx
import pytest
from commands import MESSAGES, SERVED_NAME, client, openai_client, serving, tiny_spec, wait_until
from drafters import source_of

from treespec.api.spec import Spec
from treespec.text.conversations import read_conversations

OPTIONS = {"seed": 3, "temperature": 0.9, "max_tokens": 20}
SAME = {"seed": 3, "temperature": 0.9, "max_new_tokens": 20}


@pytest.fixture(scope="module")
def ai(server):
    with openai_client(server) as made:
        yield made


@pytest.fixture(scope="module")
def chat(ai):
    """An answer of the server; options may be others."""
    return lambda **more: ai.chat.completions.create(**{"model": SERVED_NAME, "messages": MESSAGES} | OPTIONS | more)


def test_the_same_seed_gives_the_text_and_usage_of_the_python_call(chat, ai, tiny):
    wanted = tiny.generate(MESSAGES, **SAME)
    answer = chat()
    stats = wanted.stats
    assert answer.choices[0].message.content == wanted.text
    assert (answer.choices[0].finish_reason, answer.model) == ("length", SERVED_NAME)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (stats.prompt_tokens, stats.new_tokens)
    assert usage.total_tokens == stats.prompt_tokens + stats.new_tokens
    assert usage.completion_tokens_details.accepted_prediction_tokens == sum(stats.accepted)
    assert usage.treespec == {
        "accepted_draft_tokens": sum(stats.accepted),
        "draft_tokens": sum(stats.drafted),
        "cycles": stats.cycles,
        "acceptance_length": round(stats.acceptance_length, 4),
    }
    for prompt in ("the user asks", tiny.encode("the user asks")):
        wanted = tiny.generate(prompt, **SAME)
        assert ai.completions.create(model=SERVED_NAME, prompt=prompt, **OPTIONS).choices[0].text == wanted.text


def test_a_stream_adds_up_to_the_whole_answer(chat, ai, tiny):
    wanted = tiny.generate(MESSAGES, **SAME)
    counted = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(chat(**counted))
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    *begun, last, counts = chunks
    assert begun[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in begun) == wanted.text
    assert (last.choices[0].finish_reason, counts.choices) == ("length", [])
    assert len({chunk.id for chunk in chunks}) == 1
    plain = ai.completions.create(model=SERVED_NAME, prompt=tiny.encode(MESSAGES), **OPTIONS, stream=True)
    assert "".join(chunk.choices[0].text for chunk in plain) == wanted.text


def test_samples_and_prompts_take_one_seed_after_another(chat, ai, tiny):
    wanted = [tiny.generate(MESSAGES, **SAME | {"seed": 3 + i}).text for i in range(3)]
    answer = chat(n=3)
    assert [choice.message.content for choice in answer.choices] == wanted
    assert answer.usage.prompt_tokens == len(tiny.encode(MESSAGES))
    said = ["", "", ""]
    for chunk in chat(n=3, stream=True):
        said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert said == wanted
    ids = tiny.encode(MESSAGES)
    several = ai.completions.create(model=SERVED_NAME, prompt=[ids, ids[:5]], n=2, **OPTIONS)
    wanted = [tiny.generate(p, **SAME | {"seed": 3 + i}).text for i, p in enumerate([ids, ids, ids[:5], ids[:5]])]
    assert [choice.text for choice in several.choices] == wanted


def test_a_continued_conversation_reports_cached_tokens_though_others_asked_between(chat, tiny):
    talks = [[{"role": "user", "content": f"{word} asks the question " * 4}] for word in ("one", "two")]
    for turn in range(2):
        for talk in talks:
            answer = chat(messages=talk)
            said = answer.choices[0].message.content
            assert said == tiny.new().generate(talk, **SAME).text
            cached = answer.usage.prompt_tokens_details.cached_tokens
            assert cached > len(tiny.encode(talk[:1])) - 5 if turn else cached >= 0
            talk += [{"role": "assistant", "content": said}, {"role": "user", "content": "and"}]


def test_a_stop_string_or_end_token_finishes_unlike_the_limit(chat, tiny):
    whole = tiny.generate(MESSAGES, **SAME)
    stop = whole.text[5:7]
    answer = chat(stop=stop).choices[0]
    assert (answer.message.content, answer.finish_reason) == (whole.text.partition(stop)[0], "stop")
    exact = len(tiny.generate(MESSAGES, **SAME, stop=stop).token_ids)
    assert chat(stop=[stop], max_tokens=exact).choices[0] == answer
    ends = tiny.target.eos
    tiny.target.eos = frozenset(whole.token_ids[-1:])
    try:
        assert chat().choices[0].finish_reason == "stop"
    finally:
        tiny.target.eos = ends


def test_a_client_that_leaves_frees_its_place(server, http):
    body = {"messages": MESSAGES, "max_tokens": 2000, "temperature": 0, "stream": True}

    def cancelled():
        return server.metrics.registry.get_sample_value("treespec_answers_total", {"end": "cancelled"}) or 0

    before = cancelled()
    with http.stream("POST", "/v1/chat/completions", json=body | {"n": 3}) as stream:
        lines = stream.iter_lines()  # the stream ends with it
        next(lines)
        wait_until(lambda: server.engine.running == 3)
    wait_until(lambda: server.engine.running == 0)
    with pytest.raises(httpx.TimeoutException):
        http.post("/v1/chat/completions", json=body | {"stream": False}, timeout=0.2)
    wait_until(lambda: server.engine.running == 0)
    wait_until(lambda: cancelled() == before + 4)


def test_what_the_server_tells_of_itself(http, ai, tiny):
    assert [model.id for model in ai.models.list()] == [SERVED_NAME]
    model = ai.models.retrieve(SERVED_NAME)
    assert (model.max_model_len, model.dtype, model.drafter) == (4200, "float32", tiny.source.name)
    for path in ("/", "/health"):
        head = http.head(path)
        kind = http.get(path).headers["content-type"]
        assert (head.status_code, head.content, head.headers["content-type"]) == (200, b"", kind)
    assert http.get("/health").json() == {"status": "ok", "model": SERVED_NAME, "running": 0, "waiting": 0}
    ids = http.post("/tokenize", json={"messages": MESSAGES}).json()
    assert (ids["tokens"], ids["count"]) == (tiny.encode(MESSAGES), len(tiny.encode(MESSAGES)))
    assert http.post("/tokenize", json={"prompt": "user"}).json()["tokens"] == tiny.encode("user")
    ai.completions.create(model=SERVED_NAME, prompt="a", max_tokens=8)
    lines = http.get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    for name in ("completion_tokens_total", "acceptance_length_count", "cycle_seconds_count"):
        assert float(values[f"treespec_{name}"]) > 0
    assert (values["treespec_waiting"], values["treespec_running"]) == ("0.0", "0.0")
    assert 'treespec_requests_total{path="/v1/completions",status="200"}' in values


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture
def drafted():
    plain = tiny_spec()

    def new():
        return Spec(plain.target, source_of("suffix", plain.target), verifier="topk", template=plain.template)

    return new


def test_answers_are_drafted_from_those_to_the_same_key(drafted):
    """By the cycles that they take. Without keys all requests share one memory."""

    def cycles(http, key=None, path=CHAT):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = {"messages": MESSAGES} if path == CHAT else {"prompt": "the user"}
        answer = http.post(path, json=body | {"max_tokens": 24, "temperature": 0}, headers=headers)
        return answer.json()["usage"]["treespec"]["cycles"]

    with serving(drafted(), api_key=["one", "other"]) as state, client(state) as http:
        first = cycles(http, "one")
        assert cycles(http, "other") == first > cycles(http, "one")
        assert http.post(CHAT, json={"messages": MESSAGES}, headers={"Authorization": "Bearer o"}).status_code == 401
        body = {"messages": MESSAGES, "max_tokens": 24}
        told = http.post("/cycles", json=body, headers={"Authorization": "Bearer one"}).text
        assert told.count('"number"') < first
    with serving(drafted()) as state, client(state) as http:
        assert cycles(http) == first > cycles(http)
        assert cycles(http, path=COMPLETIONS) > cycles(http, path=COMPLETIONS)


def test_chats_are_kept_where_their_requests_say_store_and_training_reads_them(tiny, tmp_path):
    """A file for each key, each answer once, streamed ones too; a line that a kill has torn costs itself alone."""
    ask = {"messages": MESSAGES, "max_tokens": 5, "seed": 4}
    with serving(tiny, api_key=["one", "other"], log_completions=str(tmp_path)) as state, client(state) as http:

        def chat(key, **more):
            answer = http.post("/v1/chat/completions", json=ask | more, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 200
            return answer

        texts = [choice["message"]["content"] for choice in chat("one", store=True, n=2).json()["choices"]]
        (file,) = tmp_path.iterdir()
        assert file.stat().st_mode & 0o777 == 0o600  # whatever the umask
        file.write_bytes(file.read_bytes() + b'{"messages": [')
        chat("one", store=True, stream=True)
        chat("one")
        chat("one", store=False)
        chat("other", store=True)
    lines = [line for line in file.read_text().split("\n") if line.endswith("}")]
    kept = [json.loads(line)["messages"] for line in lines]
    assert kept == [[*MESSAGES, {"role": "assistant", "content": text}] for text in [*texts, texts[0]]]
    conversations, found = read_conversations(tmp_path)
    assert len(conversations) == 4
    assert len(found.problems) == 1
