"""Calls of tools come out of an answer's text, however it is cut into pieces, and nothing else does."""

import json
import random

import pytest
from commands import MESSAGES, client, serving, tiny_spec
from training import CHAT_TEMPLATE, tokenizer

from treespec.engine.request import Piece
from treespec.serve.messages import encode_request
from treespec.serve.schema import ChatRequest
from treespec.serve.tool_forms import detect_tool_form
from treespec.serve.tool_syntax import ParsedToolCall
from treespec.serve.tools import AnswerForm, AnswerParser

HERMES = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
LLAMA = '{% if tools %}{"name": f, "parameters": dictionary}{{ tools | tojson }}{% endif %}'
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[TOOL_CALLS]{% endif %}"
WEATHER = ParsedToolCall("weather", '{"city": "Zürich"}')
TIME = ParsedToolCall("time", "{}")
CASES = [  # template, the model's text, what is shown of it, its calls
    (HERMES, '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>', "", [WEATHER]),
    (
        HERMES,
        'Let me see.\n<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>\n'
        '<tool_call>{"name": "time", "arguments": {}}</tool_call>',
        "Let me see.\n",
        [WEATHER, TIME],
    ),
    (HERMES, "a < b, and <tool_calm> is no call", "a < b, and <tool_calm> is no call", []),
    (HERMES, "<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
    (HERMES, "<tool_call>[1]</tool_call> and more", "<tool_call>[1]</tool_call> and more", []),
    (LLAMA, '{"name": "weather", "parameters": {"city": "Zürich"}}', "", [WEATHER]),
    (LLAMA, 'It is {"name": "weather", "parameters": {}}', 'It is {"name": "weather", "parameters": {}}', []),
    (LLAMA, '{"a": 1}', '{"a": 1}', []),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Zürich"}}, {"name": "time", "arguments": {}}]',
        "",
        [WEATHER, TIME],
    ),
    (MISTRAL, 'Well.[TOOL_CALLS]weather[ARGS]{"city": "Zürich"}', "Well.", [WEATHER]),
]


def pieces_of(words, text, seed):
    """The text as pieces of a few tokens, as an answer brings them."""
    tokens = words.encode(text, add_special_tokens=False)
    coins = random.Random(seed)
    at = 0
    before = ""
    while at < len(tokens):
        size = coins.randrange(1, 6)
        upto = words.decode(tokens[: at + size], skip_special_tokens=True).rstrip("\N{REPLACEMENT CHARACTER}")
        yield Piece(upto[len(before) :], tokens[at : at + size], drafted=bool(seed % 2))
        at = at + size
        before = upto


def read_answer(form, tokenizer, pieces):
    """The text that an answer shows, and its calls."""
    parser = AnswerParser(form, tokenizer)
    parts = [parser.add(piece) for piece in pieces]
    parts.append(parser.finish())
    return "".join(part.text for part in parts), [call for part in parts for call in part.calls]


def test_five_pieces_show_the_text_before_a_call():
    parser = AnswerParser(AnswerForm(detect_tool_form(HERMES)), None)
    pieces = ["Hi", " <to", "ol_call>", '{"name": "time", "arguments": {}}', "</tool_call>"]
    parts = [parser.add(Piece(text, [], drafted=False)) for text in pieces]
    assert [part.text for part in parts] == ["Hi", " ", "", "", ""]
    assert parts[-1].calls == [TIME]
    assert not parser.finish()


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("template, text, shown, calls", CASES)
def test_calls_and_text_part_wherever_pieces_end(template, text, shown, calls, special):
    words = tokenizer()
    if special:  # such as Mistral's, which leaves them out of the text
        words.add_special_tokens({"extra_special_tokens": ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]})
    for seed in range(12):
        form = AnswerForm(detect_tool_form(template))
        assert read_answer(form, words, pieces_of(words, text, seed)) == (shown, calls)


def test_calls_of_a_template_without_tools_are_hermes():
    assert detect_tool_form(CHAT_TEMPLATE) is detect_tool_form(HERMES)
    assert detect_tool_form("{% if tools %}{% endif %}") is None  # it teaches a form that nobody knows
    piece = Piece("<tool_call>", [5], drafted=False)
    assert read_answer(AnswerForm(), tokenizer(), [piece]) == ("<tool_call>", [])


ZUG = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zug"}'}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def said_by(template, messages, variables=None):
    """What a template makes of messages with a tool."""
    spec = tiny_spec(chat_template=template)
    asked = ChatRequest(messages=messages, tools=[TOOL])
    ids = encode_request(spec, asked.messages, asked.tools, variables)
    return spec.target.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_tools_calls_and_variables_reach_the_template():
    template = (
        HERMES + "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}={{ c.function.arguments.city }}{% endfor %};"
        "{% endfor %}{{ 'thinks' if enable_thinking }}"
    )
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
        {"role": "assistant", "content": None, "tool_calls": [ZUG]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    tools, _, rest = said_by(template, messages, {"enable_thinking": True}).partition("<tool_call>")
    assert json.loads(tools) == [TOOL]
    assert rest == "system:be\nbrief;assistant:weather=Zug;tool:rain;thinks"


def test_calls_in_the_history_are_written_as_the_template_wants_them():
    """DeepSeek's templates take arguments as text, and Mistral's demand ids of nine letters and digits."""
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [ZUG]}]
    calls = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    ends = "{% endfor %}{% endfor %}"
    deepseek = "{% if tools %}<｜tool▁call▁begin｜>{% endif %}" + calls + "{{ '=' + c.function.arguments }}" + ends
    assert said_by(deepseek, messages).endswith('={"city": "Zug"}')
    demand = "{% if c.id | length != 9 %}{{ raise_exception('no id') }}{% endif %}{{ c.id }}"
    assert len(said_by("{% if tools %}{% endif %}{{ '[TOOL_CALLS]' }}" + calls + demand + ends, messages)) == 12 + 9


def test_tools_calls_and_results_are_written_for_templates_without_them():
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "content": None, "tool_calls": [ZUG]},
        {"role": "tool", "tool_call_id": "1", "content": "no"},
    ]
    for first in (0, 1):
        system, *rest = said_by(template, messages[first:]).split(";")
        assert system.startswith("system:" + ("be brief\n\n" if first == 0 else ""))
        assert json.dumps(TOOL) in system
        said = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zug"}}\n</tool_call>'
        result = "<tool_response>\nno\n</tool_response>"
        assert rest == ["user:rain?", f"assistant:{said}", f"user:{result}", ""]
        assert detect_tool_form(CHAT_TEMPLATE).parse(said, {}) == [ParsedToolCall("weather", '{"city": "Zug"}')]


def test_a_choice_of_tools_is_kept_or_refused():
    spec = tiny_spec(chat_template=HERMES + CHAT_TEMPLATE)
    body = {"messages": MESSAGES, "tools": [TOOL], "max_tokens": 4, "seed": 1}
    with serving(spec) as state, client(state) as http:

        def ask(**more):
            return http.post("/v1/chat/completions", json=body | more)

        with_tools = ask().json()["usage"]["prompt_tokens"]
        assert ask(tool_choice="none").json()["usage"]["prompt_tokens"] == len(spec.encode(MESSAGES)) < with_tools
        broken = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": "{"}}]}
        refused = ask(messages=[*MESSAGES, broken])
        assert refused.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"
        assert ask(tool_choice={"type": "other"}).json()["error"]["param"] == "tool_choice"
