"""What an answer must be, and what is told of its tokens: over HTTP the same as in Python."""

import json
from itertools import pairwise
from typing import Literal

import openai
import pydantic
import pytest
from http_serving import MESSAGES, NAME, serving, tiny_spec
from models import CHAT

from treespec.serve.logprobs import words

HERMES = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + CHAT
CITY = {"type": "object", "properties": {"city": {"enum": ["Zug", "Bern"]}}, "required": ["city"]}
CITY |= {"additionalProperties": False}


class City(pydantic.BaseModel):
    city: Literal["Zug", "Bern"]


TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "maxProperties": 0}}},
]
ASK = {"model": NAME, "messages": MESSAGES, "seed": 3, "max_tokens": 60}


@pytest.fixture(scope="module")
def spec():
    return tiny_spec(chat_template=HERMES, context=512, eos=2)


@pytest.fixture(scope="module")
def ai(spec):
    with serving(spec) as state, openai.OpenAI(base_url=f"{state.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_an_answer_by_schema_is_that_of_the_python_call(ai, spec):
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    for seed in range(4):
        answer = ai.chat.completions.create(**ASK | {"seed": seed}, response_format=form).choices[0]
        assert json.loads(answer.message.content)["city"] in ("Zug", "Bern")
        wanted = spec.generate(MESSAGES, seed=seed, temperature=1.0, max_new_tokens=60, json_schema=CITY)
        assert (answer.message.content, answer.finish_reason) == (wanted.text, "stop")
    parsed = ai.chat.completions.parse(**ASK, response_format=City).choices[0].message.parsed
    assert parsed.city in ("Zug", "Bern")
    pattern = ai.completions.create(model=NAME, prompt="a", seed=1, extra_body={"regex": "(ab){2,3}"})
    assert pattern.choices[0].text in ("abab", "ababab")
    lark = ai.completions.create(model=NAME, prompt="a", seed=1, extra_body={"grammar": 'start: "x" "y"'})
    assert lark.choices[0].text == "xy"


def test_a_broken_format_is_refused_by_its_name(ai):
    pytest.importorskip("llguidance")
    broken = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}
    cases = [("response_format", {"response_format": broken}), ("regex", {"extra_body": {"regex": "("}})]
    cases.append(("grammar", {"extra_body": {"grammar": "start: nobody"}}))
    for param, options in cases:
        with pytest.raises(openai.BadRequestError) as error:
            ai.chat.completions.create(**ASK, **options)
        assert error.value.param == param


def test_a_tool_that_must_be_called_is_called(ai):
    pytest.importorskip("llguidance")
    for seed in range(4):
        answer = ai.chat.completions.create(**ASK | {"seed": seed}, tools=TOOLS, tool_choice="required").choices[0]
        (call,) = answer.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        assert arguments == {} if call.function.name == "time" else arguments["city"] in ("Zug", "Bern")
    named = {"type": "function", "function": {"name": "weather"}}
    chunks = list(ai.chat.completions.create(**ASK, tools=TOOLS, tool_choice=named, stream=True))
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    (call,) = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or ()]
    assert (call.index, call.function.name) == (0, "weather")
    assert json.loads(call.function.arguments)["city"] in ("Zug", "Bern")
    with pytest.raises(openai.BadRequestError, match="take auto, none, required or a tool"):
        ai.chat.completions.create(**ASK, tools=TOOLS, tool_choice=named | {"function": {"name": "other"}})


def test_the_bytes_of_tokens_are_those_of_the_text():
    tokenizer = tiny_spec().target.tokenizer
    ids = [1, *tokenizer.encode("Zürich 🌍 the user", add_special_tokens=False)]
    parts = [words(tokenizer, before, token)[1] for before, token in pairwise(ids)]
    assert b"".join(parts).decode() == "Zürich 🌍 the user"
