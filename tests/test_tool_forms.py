"""Calls and thoughts of each family of models are read from its recorded form, wherever the pieces end."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from treespec.engine.request import Piece
from treespec.serve.thoughts import detect_thought_form
from treespec.serve.tool_forms import detect_tool_form
from treespec.serve.tools import AnswerForm, AnswerParser

CITY = 'Zürich "<b>" 🚋 {Süd}'
QUOTED = json.dumps(CITY, ensure_ascii=False)
ARGUMENTS = {"city": CITY, "days": 3}
JSON_ARGUMENTS = json.dumps(ARGUMENTS, ensure_ascii=False)
SCHEMAS = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "time": {"properties": {"zone": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
}
CALLS = [("weather", ARGUMENTS), ("time", {})]


@dataclass
class Family:
    """The recorded form of two calls of a family: `before`, the calls with `between`, `after`."""

    mark: str
    weather: str
    time: str
    before: str = ""
    between: str = "\n"
    after: str = ""
    tokens: tuple[str, ...] = ()
    at_start: bool = False

    @property
    def form(self):
        return detect_tool_form("{% if tools %}" + self.mark)

    @property
    def thoughts(self):
        return detect_thought_form(self.mark)

    def write(self, *calls):
        return self.before + self.between.join(calls) + self.after


def write_harmony(name, arguments):
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"


def write_kimi(name, arguments):
    return f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


HARMONY_TOKENS = ("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>", "<|call|>", "<|end|>", "<|return|>")
DEEPSEEK_TOKENS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
DEEPSEEK_TOKENS += ("<｜tool▁calls▁end｜>",)
KIMI_TOKENS = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>")
KIMI_TOKENS += ("<|tool_call_end|>", "<|tool_calls_section_end|>")
FAMILIES = {
    "hermes": Family(
        "<tool_call>",
        f'<tool_call>\n{{"name": "weather", "arguments": {JSON_ARGUMENTS}}}\n</tool_call>',
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    ),
    "llama": Family(
        '{"name": f, "parameters": dictionary}',
        f'{{"name": "weather", "parameters": {JSON_ARGUMENTS}}}',
        '{"name": "time", "parameters": {}}',
        between="; ",
        at_start=True,
    ),
    "mistral 7": Family(
        "[TOOL_CALLS]",
        f'{{"name": "weather", "arguments": {JSON_ARGUMENTS}}}',
        '{"name": "time", "arguments": {}}',
        before="[TOOL_CALLS][",
        between=", ",
        after="]",
        tokens=("[TOOL_CALLS]",),
    ),
    "mistral 11": Family(
        "[TOOL_CALLS]",
        f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{JSON_ARGUMENTS}",
        "[TOOL_CALLS]time[ARGS]{}",
        between="",
        tokens=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ),
    "qwen 3.5": Family(
        "<tool_call>\n<function=name>",
        f"<tool_call>\n<function=weather>\n<parameter=city>\n{CITY}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "<tool_call>\n<function=time>\n</function>\n</tool_call>",
    ),
    "glm 4.5": Family(
        "<tool_call>{name}\n<arg_key>",
        f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        "<tool_call>time\n</tool_call>",
        tokens=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "glm 4.7": Family(
        "<tool_call>{name}<arg_key>",
        f"<tool_call>weather<arg_key>city</arg_key><arg_value>{CITY}</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call>",
        "<tool_call>time</tool_call>",
        between="",
    ),
    "gpt-oss": Family(
        "<|channel|>",
        write_harmony("weather", JSON_ARGUMENTS),
        write_harmony("time", "{}"),
        between="<|start|>assistant",
        tokens=HARMONY_TOKENS,
    ),
    "gpt-oss in history": Family(
        "<|channel|>",
        f" to=functions.weather<|channel|>commentary json<|message|>{JSON_ARGUMENTS}<|call|>",
        " to=functions.time<|channel|>commentary json<|message|>{}<|call|>",
        between="<|start|>assistant",
        tokens=HARMONY_TOKENS,
    ),
    "cohere": Family(
        "<|START_ACTION|>",
        f'{{"tool_call_id": "0", "tool_name": "weather", "parameters": {JSON_ARGUMENTS}}}',
        '{"tool_call_id": "1", "tool_name": "time", "parameters": {}}',
        before="<|START_ACTION|>[\n    ",
        between=",\n    ",
        after="\n]<|END_ACTION|>",
        tokens=("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    "lfm 2.5": Family(
        "<|tool_call_start|>",
        f"weather(city={CITY!r}, days=3)",
        "time()",
        before="<|tool_call_start|>[",
        between=", ",
        after="]<|tool_call_end|>",
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "apriel": Family(
        "<tool_calls>",
        f'{{"name": "weather", "arguments": {JSON_ARGUMENTS}}}',
        '{"name": "time", "arguments": {}}',
        before="<tool_calls>[",
        between=", ",
        after="]</tool_calls>",
    ),
    "nemotron 2": Family(
        "<TOOLCALL>",
        f'{{"name": "weather", "arguments": {JSON_ARGUMENTS}}}',
        '{"name": "time", "arguments": {}}',
        before="<TOOLCALL>[",
        between=", ",
        after="]</TOOLCALL>",
    ),
    "functionary 3.1": Family(
        "<function=name>{a}",
        f"<function=weather>{JSON_ARGUMENTS}</function>",
        "<function=time>{}</function>",
        between="",
    ),
    "deepseek 3": Family(
        "<｜tool▁call▁begin｜>",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{JSON_ARGUMENTS}\n```<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    "deepseek 3.1": Family(
        "<｜tool▁call▁begin｜>",
        f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON_ARGUMENTS}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        between="",
        after="<｜tool▁calls▁end｜>",
        tokens=DEEPSEEK_TOKENS,
    ),
    "deepseek 3.2": Family(
        "<｜DSML｜function_calls>",
        f'<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">{CITY}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>',
        '<｜DSML｜invoke name="time">\n</｜DSML｜invoke>',
        before="<｜DSML｜function_calls>\n",
        after="\n</｜DSML｜function_calls>",
    ),
    "kimi k2": Family(
        "<|tool_calls_section_begin|>",
        write_kimi("weather", JSON_ARGUMENTS),
        write_kimi("time", "{}"),
        before="<|tool_calls_section_begin|>",
        between="",
        after="<|tool_calls_section_end|>",
        tokens=KIMI_TOKENS,
    ),
    "minimax m2": Family(
        "<minimax:tool_call>",
        f'<invoke name="weather">\n<parameter name="city">{CITY}</parameter>\n<parameter name="days">3</parameter>\n'
        "</invoke>",
        '<invoke name="time">\n</invoke>',
        before="<minimax:tool_call>\n",
        after="\n</minimax:tool_call>",
    ),
    "gemma 4": Family(
        "<|tool_call>",
        f'<|tool_call>call:weather{{city:<|"|>{CITY}<|"|>,days:3}}<tool_call|>',
        "<|tool_call>call:time{}<tool_call|>",
        between="",
        tokens=("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
}


class Letters:
    """A tokenizer whose tokens are characters, and some special tokens, which it leaves out of the text."""

    def __init__(self, specials=()):
        self.specials = {0x110000 + number: text for number, text in enumerate(specials)}
        self.added_tokens_decoder = {
            number: SimpleNamespace(special=True, content=text) for number, text in self.specials.items()
        }

    def encode(self, text):
        tokens = []
        while text:
            for number, special in self.specials.items():
                if text.startswith(special):
                    tokens.append(number)
                    text = text[len(special) :]
                    break
            else:
                tokens.append(ord(text[0]))
                text = text[1:]
        return tokens

    def decode(self, tokens, **options):
        return "".join(chr(token) for token in tokens if token not in self.specials)


def read_pieces(form, letters, pieces, thinking=False):
    """What a parser makes of pieces, each a list of tokens: (thought, text, calls)."""
    parser = AnswerParser(form, letters, thinking)
    parts = [parser.add(Piece(letters.decode(tokens), tokens, drafted=False)) for tokens in pieces]
    parts.append(parser.finish())
    calls = [(call.name, json.loads(call.arguments)) for part in parts for call in part.calls]
    return "".join(part.thought for part in parts), "".join(part.text for part in parts), calls


def read_every_cut(form, text, specials=(), thinking=False):
    """What a parser makes of a text: the same, whether it comes whole, in letters, or cut in two at any place."""
    letters = Letters(specials)
    tokens = letters.encode(text)
    whole = read_pieces(form, letters, [tokens], thinking)
    assert read_pieces(form, letters, [[token] for token in tokens], thinking) == whole
    for cut in range(1, len(tokens)):
        assert read_pieces(form, letters, [tokens[:cut], tokens[cut:]], thinking) == whole, (cut, text)
    return whole


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_calls_of_each_family_are_read_wherever_pieces_end(family, special):
    specials = family.tokens if special else ()
    form = AnswerForm(family.form, family.thoughts, SCHEMAS)
    assert read_every_cut(form, family.write(family.weather), specials) == ("", "", CALLS[:1])
    assert read_every_cut(form, family.write(family.weather, family.time), specials) == ("", "", CALLS)
    if not family.at_start:
        inside = "Ich schaue 🚋 <nach>.\n" + family.write(family.weather)
        assert read_every_cut(form, inside, specials) == ("", "Ich schaue 🚋 <nach>.\n", CALLS[:1])


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_broken_call_of_each_family_stays_text(family):
    form = AnswerForm(family.form, schemas=SCHEMAS)
    for text in (family.write(family.weather)[: len(family.before) + 14], "a < b | c [TOOL] {x}"):
        assert read_every_cut(form, text) == ("", text, [])


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_call_that_is_cut_short_is_no_other_call(family):
    form = AnswerForm(family.form, family.thoughts, SCHEMAS)
    text = family.write(family.weather)
    for cut in range(len(text)):
        assert read_pieces(form, Letters(), [[*map(ord, text[:cut])]])[2] in ([], CALLS[:1])


@pytest.mark.parametrize(
    "inside",
    ["[weather(**{'city': 1})]", "[weather(days={[]: 1})]", "[" + 50_000 * "-" + "1]", "weather()", "[weather(3)]"],
)
def test_python_that_is_no_call_stays_text(inside):
    form = AnswerForm(FAMILIES["lfm 2.5"].form, schemas=SCHEMAS)
    text = f"<|tool_call_start|>{inside}<|tool_call_end|>"
    assert read_pieces(form, Letters(), [[*map(ord, text)]]) == ("", text, [])


@pytest.mark.parametrize("source", ['{"name": n, "parameters": p}', "]<]minimax[>[<tool_call>"])
def test_a_form_that_is_not_read_is_taken_for_no_other(source):
    assert detect_tool_form("{% if tools %}" + source) is None


JSON_FAMILIES = ("hermes", "llama", "mistral 7", "mistral 11", "gpt-oss", "deepseek 3", "deepseek 3.1", "kimi k2")


@pytest.mark.parametrize("name", JSON_FAMILIES)
def test_arguments_that_are_no_json_stay_text(name):
    family = FAMILIES[name]
    text = family.write(family.weather.replace('"days": 3', '"days": three'))
    thought, shown, calls = read_every_cut(AnswerForm(family.form), text)
    assert (thought, shown, calls) == ("", text, [])


def test_a_call_is_told_as_soon_as_it_has_ended():
    family = FAMILIES["qwen 3.5"]
    parser = AnswerParser(AnswerForm(family.form, schemas=SCHEMAS), None)
    bursts = [parser.add(Piece(text, [], drafted=False)) for text in (family.weather, "\n", family.time, "\nDone.")]
    assert [[call.name for call in burst.calls] for burst in bursts] == [["weather"], [], ["time"], []]
    assert [burst.text for burst in bursts] == ["", "", "", "Done."]


@pytest.mark.parametrize(
    "name, text, value",
    [("qwen 3.5", "null", None), ("qwen 3.5", "None", None), ("qwen 3.5", "7", "7"), ("qwen 3.5", "a\nb", "a\nb")],
)
def test_arguments_in_tags_have_the_types_of_the_schema(name, text, value):
    call = f"<tool_call>\n<function=time>\n<parameter=zone>\n{text}\n</parameter>\n</function>\n</tool_call>"
    parser = AnswerParser(AnswerForm(FAMILIES[name].form, schemas=SCHEMAS), None)
    (parsed,) = parser.add(Piece(call, [], drafted=False)).calls
    assert json.loads(parsed.arguments) == {"zone": value}


def test_ids_are_those_of_the_answer_and_of_the_templates_form():
    def read_id(name):
        family = FAMILIES[name]
        parser = AnswerParser(AnswerForm(family.form), None)
        parts = [parser.add(Piece(family.write(family.weather), [], drafted=False)), parser.finish()]
        (call,) = [call for part in parts for call in part.calls]
        return call.to_fields(parser.id_pattern)["id"]

    assert read_id("kimi k2") == "functions.weather:0"
    assert read_id("mistral 11") == "a1b2c3d4e"
    assert len(read_id("mistral 7")) == 9
    assert read_id("hermes").startswith("call_")


THOUGHTS = {  # template, what the answer writes, special tokens
    "think": ("</think>", "<think>\nHm <b>, 🚋?\n</think>\n\nYes.", ("<think>", "</think>")),
    "mistral": ("[THINK]", "[THINK]Hm <b>, 🚋?[/THINK]Yes.", ("[THINK]", "[/THINK]")),
    "gemma 4": ("<|channel>", "<|channel>thought\nHm <b>, 🚋?\n<channel|>Yes.", ("<|channel>", "<channel|>")),
    "cohere": (
        "<|START_THINKING|>",
        "<|START_THINKING|>Hm <b>, 🚋?<|END_THINKING|>Yes.",
        ("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "seed": ("</seed:think>", "<seed:think>Hm <b>, 🚋?</seed:think>Yes.", ()),
    "gpt-oss": (
        "<|channel|>",
        "<|channel|>analysis<|message|>Hm <b>, 🚋?<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        HARMONY_TOKENS,
    ),
}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("mark, text, tokens", THOUGHTS.values(), ids=THOUGHTS)
def test_thoughts_of_each_family_part_from_the_text(mark, text, tokens, special):
    form = AnswerForm(None, detect_thought_form(mark))
    specials = tokens if special else ()
    assert read_every_cut(form, text, specials) == ("Hm <b>, 🚋?", "Yes.", [])
    opening = form.thoughts.opening
    opened = text.removeprefix(opening)
    assert read_every_cut(form, opened, specials, thinking=True) == ("Hm <b>, 🚋?", "Yes.", [])
    cut = text[: text.index("🚋")]
    assert read_every_cut(form, cut, specials) == ("Hm <b>,", "", [])
    if not form.thoughts.dropped:
        plain = f" No {opening} here. "
        assert read_every_cut(form, plain) == ("", plain, [])


def test_a_call_follows_a_thought():
    pairs = (("qwen 3.5", "think"), ("gemma 4", "gemma 4"), ("cohere", "cohere"))
    for name, thought in (*pairs, ("gpt-oss", "gpt-oss"), ("gpt-oss in history", "gpt-oss")):
        family = FAMILIES[name]
        mark, text, tokens = THOUGHTS[thought]
        begun = text[: text.index("Yes.")].removesuffix("<|channel|>final<|message|>")
        form = AnswerForm(family.form, detect_thought_form(mark), SCHEMAS)
        answer = begun + family.write(family.weather)
        for specials in ((), tuple({*family.tokens, *tokens})):
            assert read_every_cut(form, answer, specials) == ("Hm <b>, 🚋?", "", CALLS[:1])


def test_without_parallel_calls_only_the_first_is_told():
    family = FAMILIES["hermes"]
    form = AnswerForm(family.form, most=1)
    assert read_every_cut(form, family.write(family.weather, family.time)) == ("", "", CALLS[:1])
