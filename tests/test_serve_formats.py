"""What an answer must be, and what is told of its tokens: over HTTP the same as in Python."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
import pydantic
import pytest
from commands import MESSAGES, SERVED_NAME, client, openai_client, serving, tiny_spec
from training import CHAT_TEMPLATE

HERMES = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + CHAT_TEMPLATE
CITY = {"type": "object", "properties": {"city": {"enum": ["Zug", "Bern"]}}, "required": ["city"]}
CITY |= {"additionalProperties": False}


class City(pydantic.BaseModel):
    city: Literal["Zug", "Bern"]


TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "maxProperties": 0}}},
]
ASK = {"model": SERVED_NAME, "messages": MESSAGES, "seed": 3, "max_tokens": 60}


@pytest.fixture(scope="module")
def spec():
    return tiny_spec(chat_template=HERMES, context=512, eos=2)


@pytest.fixture(scope="module")
def ai(spec):
    with serving(spec) as state, openai_client(state) as made:
        yield made


@pytest.fixture(scope="module")
def chat(ai):
    return lambda **more: ai.chat.completions.create(**ASK | more)


def test_an_answer_by_schema_is_that_of_the_python_call(chat, ai, spec):
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    for seed in range(4):
        answer = chat(seed=seed, response_format=form).choices[0]
        assert json.loads(answer.message.content)["city"] in ("Zug", "Bern")
        wanted = spec.generate(MESSAGES, seed=seed, temperature=1.0, max_new_tokens=60, json_schema=CITY)
        assert (answer.message.content, answer.finish_reason) == (wanted.text, "stop")
    parsed = ai.chat.completions.parse(**ASK, response_format=City).choices[0].message.parsed
    assert parsed.city in ("Zug", "Bern")
    pattern = ai.completions.create(model=SERVED_NAME, prompt="a", seed=1, extra_body={"regex": "(ab){2,3}"})
    assert pattern.choices[0].text in ("abab", "ababab")
    lark = ai.completions.create(model=SERVED_NAME, prompt="a", seed=1, extra_body={"grammar": 'start: "x" "y"'})
    assert lark.choices[0].text == "xy"


@pytest.mark.parametrize(
    "param, options",
    [
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}),
        ("regex", "("),
        ("grammar", "start: nobody"),
    ],
)
def test_a_broken_format_is_refused_by_its_name(chat, param, options):
    with pytest.raises(openai.BadRequestError) as error:
        chat(extra_body={param: options})
    assert error.value.param == param


def nested(depth):
    return {"type": "object", "properties": {"a": nested(depth - 1)}} if depth else {"type": "string"}


RULES = "".join(f'r{i}: "x{i}" r{(i + 1) % 3000}?\n' for i in range(3000))
HEAVY = {  # each took a second or more, or ended in a 500 or in a crash of the server
    "nested": nested(400),
    "surrogate": {"properties": {"\ud800": {}}},
    "properties": {"properties": {f"p{i}": {"type": "string"} for i in range(5000)}},
    "optional": {"regex": "(a?){500}a{500}"},
    "repeated": {"regex": "((a{100}){100}){100}"},
    "repeated later": {"regex": "[a-z]{40}((a{100}){100}){100}"},
    "endless": {"grammar": 'start: %json {"$ref":"#"}'},
    "deep rules": {"grammar": "start: " + " | ".join(f"r{i}" for i in range(3000)) + "\n" + RULES},
}


def test_a_heavy_grammar_is_refused_while_others_are_answered(spec):
    with serving(spec) as state, client(state) as http, client(state) as other, ThreadPoolExecutor(1) as pool:
        for name, source in HEAVY.items():
            schema = {"type": "json_schema", "json_schema": {"name": name, "schema": source}}
            format = source if {"regex", "grammar"} & source.keys() else {"response_format": schema}
            content = json.dumps({"messages": MESSAGES, "max_tokens": 60} | format)
            headers = {"Content-Type": "application/json"}
            answer = pool.submit(http.post, "/v1/chat/completions", content=content, headers=headers)
            while not answer.done():
                assert other.get("/health", timeout=2).status_code == 200
                time.sleep(0.01)
            error = answer.result().json()["error"]
            assert (answer.result().status_code, error["type"]) == (400, "invalid_request_error"), (name, error)
            assert error["param"] in ("response_format", "regex", "grammar")
        fine = {"messages": MESSAGES, "regex": "(ab){2,3}"}
        assert http.post("/v1/chat/completions", json=fine).status_code == 200


def test_a_tool_that_must_be_called_is_called(chat):
    for seed in range(4):
        answer = chat(seed=seed, tools=TOOLS, tool_choice="required").choices[0]
        (call,) = answer.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        assert arguments == {} if call.function.name == "time" else arguments["city"] in ("Zug", "Bern")
    named = {"type": "function", "function": {"name": "weather"}}
    chunks = list(chat(tools=TOOLS, tool_choice=named, stream=True))
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    (call,) = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or ()]
    assert (call.index, call.function.name) == (0, "weather")
    assert json.loads(call.function.arguments)["city"] in ("Zug", "Bern")
    with pytest.raises(openai.BadRequestError, match="take auto, none, required or a tool"):
        chat(tools=TOOLS, tool_choice=named | {"function": {"name": "other"}})


def test_log_probabilities_are_those_of_the_python_call(chat, spec):
    wanted = spec.generate(MESSAGES, seed=3, temperature=1.0, max_new_tokens=12, logprobs=True, top_logprobs=3)
    options = {"max_tokens": 12, "logprobs": True, "top_logprobs": 3}
    whole = chat(**options).choices[0].logprobs.content
    streamed = []
    for chunk in chat(**options, stream=True):
        streamed += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
    assert [one.bytes and bytes(one.bytes).decode() for one in whole] == [
        None if "\N{REPLACEMENT CHARACTER}" in one.token else one.token for one in whole
    ]
    for told, again, known in zip(whole, streamed, wanted.logprobs, strict=True):
        assert (again.token, again.bytes) == (told.token, told.bytes)
        assert [again.logprob, told.logprob] == pytest.approx([known.logprob] * 2, abs=1e-4)
        assert [top.logprob for top in told.top_logprobs] == pytest.approx([p for _, p in known.top], abs=1e-4)


def test_completions_tell_log_probabilities_in_their_own_form(ai, spec):
    wanted = spec.generate("the user", seed=3, temperature=1.0, max_new_tokens=8)
    first, _ = ai.completions.create(
        model=SERVED_NAME, prompt="the user", seed=3, max_tokens=8, logprobs=2, n=2
    ).choices
    told = first.logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(wanted.token_ids)
    assert told.text_offset == sorted(told.text_offset)


def test_penalties_biases_and_ends_are_those_of_the_python_call(chat, spec):
    token = spec.encode("user")[0]
    pairs = [
        ({"frequency_penalty": 1.5, "presence_penalty": 0.5}, {}),
        ({"logit_bias": {str(token): 100}}, {"logit_bias": {token: 100.0}}),
        ({"extra_body": {"repetition_penalty": 1.3, "top_k": 5, "min_p": 0.01}}, None),
        ({"extra_body": {"min_tokens": 5, "ignore_eos": True}}, None),
    ]
    for asked, options in pairs:
        wanted = asked.get("extra_body") if options is None else options or asked
        answer = chat(max_tokens=20, **asked).choices[0].message.content
        assert answer == spec.generate(MESSAGES, seed=3, temperature=1.0, max_new_tokens=20, **wanted).text
