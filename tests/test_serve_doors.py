"""Fields and endpoints at which clients of other servers knock: each is answered, or refused in words."""

import json
import re

import pytest
import torch
from commands import MESSAGES, SERVED_NAME, client, openai_client, serving, tiny_spec
from training import CHAT_TEMPLATE

from treespec.serve.run import list_form_warnings

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    + CHAT_TEMPLATE
    + "{% if enable_thinking %}<think>\n{% else %}<think></think>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
NAMED = {"type": "function", "name": "weather"}
FLAT_TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object", "maxProperties": 0}}]


def allow(mode, *names):
    """The choice of some tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}}


OLD_CALL = {"role": "assistant", "content": None, "function_call": {"name": "time", "arguments": "{}"}}
OLD_RESULT = {"role": "function", "name": "time", "content": "noon"}
REFUSAL = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
CALLED = {"tools": [{"type": "function", "function": FLAT_TOOLS[0]}], "tool_choice": "required"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["x"]}}}
DOORS = [  # path, what is asked beside the prompt, status, words of the error
    (CHAT, {"seed": -1}, 200, ""),
    (CHAT, {"seed": -2}, 400, "Invalid 'seed'"),
    (CHAT, {"max_tokens": 10**9}, 200, ""),
    (CHAT, {"max_completion_tokens": 10**9}, 200, ""),
    (CHAT, {"max_tokens": 0}, 400, "Invalid 'max_tokens'"),
    (CHAT, {"verbosity": "low"}, 200, ""),
    (CHAT, {"verbosity": "loud"}, 400, "Invalid 'verbosity'"),
    (CHAT, {"reasoning_effort": "none"}, 200, ""),
    (CHAT, {"reasoning_effort": "high"}, 200, ""),
    (CHAT, {"reasoning_effort": "most"}, 400, "Invalid 'reasoning_effort'"),
    (CHAT, {"messages": [*MESSAGES, REFUSAL, *MESSAGES]}, 200, ""),
    (CHAT, {"messages": [*MESSAGES, OLD_CALL, OLD_RESULT]}, 200, ""),
    (CHAT, {"structured_outputs": {"regex": "ab"}}, 200, ""),
    (CHAT, {"structured_outputs": {"json": {"enum": ["x"]}}}, 200, ""),
    (CHAT, {"structured_outputs": {"grammar": 'start: "x"'}}, 200, ""),
    (CHAT, {"structured_outputs": {"choice": ["ja", 'ne"in']}}, 200, ""),
    (CHAT, {"structured_outputs": {}}, 400, "give one of json, regex, choice, grammar and json_object"),
    (CHAT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "give one of"),
    (CHAT, {"structured_outputs": {"regex": "a"}, "regex": "b"}, 400, "leave one out"),
    (CHAT, {"structured_outputs": {"structural_tag": "a"}}, 400, "structural_tag"),
    (CHAT, allow("auto", "time"), 200, ""),
    (CHAT, allow("required", "time"), 200, ""),
    (CHAT, allow("auto", "rain"), 400, "'rain', which no tool is"),
    (CHAT, CALLED | {"response_format": FORMAT}, 200, ""),
    (CHAT, CALLED | {"regex": "a"}, 400, "leave out another"),
    (CHAT, {"guided_regex": "ab", "guided_decoding_backend": "x", "structured_outputs": {"regex": "ab"}}, 200, ""),
    (CHAT, {"guided_regex": "ab", "structured_outputs": {"regex": "b"}}, 400, "Unknown parameter: 'guided_regex'"),
    (COMPLETIONS, {"prompt": ""}, 200, ""),
    (COMPLETIONS, {"prompt": []}, 400, "empty list"),
    (COMPLETIONS, {"max_tokens": 10**9}, 200, ""),
    (COMPLETIONS, {"max_tokens": 0}, 400, "only with echo"),
    (COMPLETIONS, {"max_tokens": 0, "echo": True}, 200, ""),
    (COMPLETIONS, {"max_tokens": 0, "echo": True, "logprobs": 1, "stream": True}, 200, ""),
    (COMPLETIONS, {"structured_outputs": {"choice": ["ja"]}}, 200, ""),
    (f"{CHAT}/", {}, 200, ""),
    (RESPONSES, {"store": True, "include": ["reasoning.encrypted_content"], "truncation": "auto"}, 200, ""),
    (RESPONSES, {"previous_response_id": "resp_1"}, 400, "keeps no conversations"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, 400, "only functions run here"),
    (RESPONSES, {"input": [{"type": "mcp_call"}]}, 400, "does not know"),
    (RESPONSES, {"input": [{"role": "usr", "content": "a"}]}, 400, "messages[0].role"),
    (RESPONSES, {"background": True}, 400, "background"),
    (f"{COMPLETIONS}/", {}, 200, ""),
]
PROMPTS = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "the user"}, RESPONSES: {"input": "the user"}}


@pytest.fixture(scope="module")
def spec():
    return tiny_spec(chat_template=TEMPLATE, context=192, eos=2)


@pytest.fixture(scope="module")
def server(spec):
    with serving(spec, max_tokens=24) as state:
        yield state


@pytest.fixture(scope="module")
def http(server):
    with client(server) as made:
        yield made


@pytest.mark.parametrize("path, asked, status, words", DOORS)
def test_each_door_answers_or_says_why_not(http, path, asked, status, words):
    answer = http.post(path, json=PROMPTS[path.rstrip("/")] | asked)
    assert answer.status_code == status, answer.text
    if status == 400:
        assert words in answer.json()["error"]["message"]


def test_a_template_of_an_unknown_tool_form_is_told_at_the_start(spec, monkeypatch):
    assert list_form_warnings(spec) == []
    monkeypatch.setattr(spec.target.tokenizer, "chat_template", "{% if tools %}{{ tools }}<call>{% endif %}")
    (warning,) = list_form_warnings(spec)
    assert "tool calls come back as text" in warning


def test_a_limit_beyond_the_servers_is_cut_to_it(http):
    answer = http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 10**9, "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_full_context_is_told_in_openais_words(http):
    for body in ({"prompt": [3] * 500}, {"prompt": "the user asks " * 5000}):
        error = http.post(COMPLETIONS, json=body).json()["error"]
        assert re.match(r"This model's maximum context length is 192 tokens\. However, ", error["message"])
        assert error["code"] == "context_length_exceeded"


def test_a_choice_of_structured_outputs_is_one_of_them(http):
    for seed in range(3):
        body = {"messages": MESSAGES, "seed": seed, "structured_outputs": {"choice": ["ja", 'ne"in']}}
        assert http.post(CHAT, json=body).json()["choices"][0]["message"]["content"] in ("ja", 'ne"in')


def test_scores_of_a_prompt_are_those_of_transformers(http, spec):
    ids = spec.encode("the user asks the question one two and the user answers it")
    body = {"prompt": ids, "echo": True, "logprobs": 2, "max_tokens": 1, "temperature": 0}
    choice = http.post(COMPLETIONS, json=body).json()["choices"][0]
    told = choice["logprobs"]
    assert len(told["token_logprobs"]) == len(told["tokens"]) == len(told["text_offset"]) == len(ids) + 1
    with torch.inference_mode():
        logits = spec.target.model(torch.tensor([ids])).logits[0, :-1].float()
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert told["token_logprobs"][1:-1] == pytest.approx(wanted.tolist(), abs=1e-3)
    for place, row in enumerate(logits.log_softmax(-1), 1):
        assert max(told["top_logprobs"][place].values()) == pytest.approx(row.max().item(), abs=1e-3)
    silent = http.post(COMPLETIONS, json=body | {"max_tokens": 0}).json()["choices"][0]
    assert silent["logprobs"]["token_logprobs"] == told["token_logprobs"][:-1]
    assert silent["text"] == spec.target.tokenizer.decode(ids)


def test_an_opened_thought_is_told_apart_in_answers_and_streams(http):
    body = {"messages": MESSAGES, "seed": 1, "chat_template_kwargs": {"enable_thinking": True}, "regex": "ab"}
    message = http.post(CHAT, json=body).json()["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["content"] == ""
    streamed = ""
    with http.stream("POST", CHAT, json=body | {"stream": True}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                streamed += json.loads(line[6:])["choices"][0]["delta"].get("reasoning_content", "")
    assert streamed.rstrip() == message["reasoning_content"].rstrip()
    plain = body | {"reasoning_effort": "none", "chat_template_kwargs": {}}
    assert http.post(CHAT, json=plain).json()["choices"][0]["message"]["content"] == "ab"


def test_the_responses_api_answers_as_chats_do(server, http):
    with openai_client(server) as ai:
        ask = {"model": SERVED_NAME, "input": "the user asks", "temperature": 0, "max_output_tokens": 12}
        response = ai.responses.create(**ask)
        chat = http.post(CHAT, json={"messages": MESSAGES, "temperature": 0, "max_tokens": 12}).json()
        assert response.output_text == chat["choices"][0]["message"]["content"] != ""
        assert (response.status, response.usage.output_tokens) == ("incomplete", 12)
        events = list(ai.responses.create(**ask, stream=True))
        assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == response.output_text
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].response.output_text == response.output_text
        schema = {"type": "json_schema", "name": "x", "schema": {"enum": ["x"]}, "strict": True}
        with ai.responses.stream(**ask, text={"format": schema}) as stream:
            assert stream.get_final_response().output_text == '"x"'

        called = ai.responses.create(**ask | {"temperature": 1}, tools=FLAT_TOOLS, tool_choice=NAMED)
        (call,) = called.output
        assert (call.type, call.name, call.arguments, called.status) == ("function_call", "weather", "{}", "completed")
        history = [{"role": "user", "content": "rain?"}, call.model_dump()]
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "no"})
        assert ai.responses.create(**ask | {"input": history}, tools=FLAT_TOOLS).output_text
