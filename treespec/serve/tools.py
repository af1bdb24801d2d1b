"""Calls of tools in the text of an answer, by the form that the model's chat template teaches.

<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>     Hermes, Qwen, SmolLM
[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]              Mistral
{"name": "f", "parameters": {"x": 1}}                           Llama 3
"""

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from treespec.decoding.sequence import Piece
from treespec.serve.errors import ApiError
from treespec.serve.schema import ChatRequest, Tool, ToolFunction
from treespec.shaping.compiled import KINDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Call:
    """arguments: JSON."""

    name: str
    arguments: str

    @property
    def fields(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


@dataclass(frozen=True)
class Form:
    """mark: what a template of this form holds. opening: the text or special token at which calls
    begin, anywhere in an answer, or with `at_start` at its start alone. parse: the calls from there
    on; [] for none.
    """

    mark: str
    opening: str
    parse: Callable[[str], list[Call]]
    at_start: bool = False


def _objects(text: str) -> list[Any]:
    """JSON values that follow each other, separated by spaces, commas or semicolons.

    [] if anything else lies between.
    """
    decoder, values, at = json.JSONDecoder(), [], 0
    while at < len(text):
        if text[at] in " \t\r\n,;":
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        values += value if isinstance(value, list) else [value]
    return values


def _calls(values: list[Any]) -> list[Call]:
    """[] unless every value is a call."""
    calls = []
    for value in values:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return []
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not isinstance(arguments, str):
            return []
        calls.append(Call(value["name"], arguments))
    return calls


def _hermes(text: str) -> list[Call]:
    calls: list[Call] = []
    for body in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL):
        several = _calls(_objects(body))
        if not several:
            return []
        calls += several
    return calls


def _mistral(text: str) -> list[Call]:
    calls: list[Call] = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        name, marked, arguments = part.partition("[ARGS]")
        values = _objects(arguments if marked else part)
        named = [{"name": name.strip(), "arguments": value} for value in values]
        calls += _calls(named if marked else values)
    return calls


def calls_in(text: str) -> list[Call]:
    """The calls of a text that is nothing but calls, as JSON; [] for any other text."""
    return _calls(_objects(text.strip().removeprefix("<|python_tag|>")))


TEACHING = """\
You may call functions to help with the user's question. These are their signatures:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments between tags:
<tool_call>
{"name": "<name>", "arguments": {<arguments>}}
</tool_call>
The results follow between <tool_response> tags."""
FORMS = (
    Form("<tool_call>", "<tool_call>", _hermes),
    Form("[TOOL_CALLS]", "[TOOL_CALLS]", _mistral),
    Form('"parameters"', "{", calls_in, at_start=True),
)


def form_of(source: str) -> Form | None:
    """The form that a template's source teaches; Hermes' where it has no place for tools."""
    taught = next((form for form in FORMS if form.mark in source), None)
    return taught if has_place(source) else FORMS[0]


def has_place(source: str) -> bool:
    """Whether a template's source shows tools."""
    return re.search(r"\btools\b", source) is not None


def taught(tools: Sequence[Mapping[str, Any]]) -> str:
    """The part of a system message that shows tools, for a template without a place for them."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return TEACHING.replace("{tools}", lines)


def written(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its calls, or the result of one, as text in Hermes' form."""
    content, calls = message["content"], message.get("tool_calls") or ()
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    texts = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
    marked = [f"<tool_call>\n{text}\n</tool_call>" for text in texts]
    fields = {name: value for name, value in message.items() if name != "tool_calls"}
    return fields | {"content": "\n".join([*([content] if content else []), *marked])}


@final
class Catcher:
    """Parts the pieces of an answer into text to show and calls.

    form: None shows everything. Text from the opening on is held until the answer ends: only then
    is it known to be calls. most: calls to return; None: all.
    """

    def __init__(
        self,
        form: Form | None,
        tokenizer: "PreTrainedTokenizerBase | None",
        most: int | None = None,
    ) -> None:
        self.form, self.tokenizer, self.most = form, tokenizer, most
        self.opened, self.held, self.shown = False, "", 0
        self.tokens: list[int] = []
        added = tokenizer.get_added_vocab() if tokenizer and form else {}
        self.opening_id = added.get(form.opening) if form else None

    def show(self, piece: Piece) -> str:
        """The text that may be shown once this piece is there."""
        self.tokens += piece.token_ids
        self.held += piece.text
        border = self._border(self.form, piece) if self.form else len(self.held)
        text, self.held = self.held[:border], self.held[border:]
        self.shown += border
        return text

    def finish(self) -> tuple[str, list[Call]]:
        """At the end of an answer: the text still to show, and the calls."""
        if self.form is None or self.tokenizer is None or not self.opened:
            return self.held, []
        whole = self._text(self.tokens, special_too=True)
        for special in self.tokenizer.all_special_tokens:
            whole = whole.removesuffix(special)
        at = 0 if self.form.at_start else whole.find(self.form.opening)
        calls = self.form.parse(whole[at:])[: self.most]
        if not calls:
            return self.held, []
        if self.opening_id not in self.tokens:
            return "", calls
        before = self._text(self.tokens[: self.tokens.index(self.opening_id)])
        return before[self.shown :], calls

    def _border(self, form: Form, piece: Piece) -> int:
        """Characters of the held text before the opening, or before what may become it."""
        # 1. Nothing is shown any more once calls have begun.
        if self.opened or self.opening_id in piece.token_ids:
            self.opened = True
            return 0

        # 2. The start of the answer decides.
        if form.at_start:
            begun = self.held.lstrip()
            self.opened = begun.startswith(form.opening)
            if begun and not self.opened:
                self.form = None
                return len(self.held)
            return 0

        # 3. Any place may be the opening's.
        at = self.held.find(form.opening)
        if at >= 0:
            self.opened = True
            return at
        longest = min(len(form.opening) - 1, len(self.held))
        ends = (size for size in range(longest, 0, -1) if self.held.endswith(form.opening[:size]))
        return len(self.held) - next(ends, 0)

    def _text(self, tokens: list[int], special_too: bool = False) -> str:
        assert self.tokenizer
        options: dict[str, Any] = {"clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(tokens, skip_special_tokens=not special_too, **options))


Choice = tuple[Sequence[Tool], Form | None, dict[str, Any] | None]


def choice_of(asked: ChatRequest) -> Choice:
    """(tools that the template shows, form of the calls, schema of the answer).

    Form and schema are None but where a call must come. Raises ApiError for a choice that names no
    tool, and beside another format.
    """
    # 1. Tools that may be called, or none.
    tools, wanted = asked.tools or [], asked.tool_choice
    if wanted in (None, "auto", "none"):
        return ([] if wanted == "none" else tools), None, None
    if any(kind in asked.options() for kind in KINDS):
        message = "a tool that must be called fixes the format of the answer: leave out another"
        raise ApiError(400, message, "tool_choice")

    # 2. Any of them.
    named = {tool.function.name: tool.function for tool in tools}
    if wanted == "required" and tools:
        return tools, Form("", "", calls_in, at_start=True), _any_call(named)

    # 3. One by its name.
    function = wanted.get("function") if isinstance(wanted, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in named:
        known = ", ".join(named) or "no tools are given"
        message = f"tool_choice is {wanted!r:.80}: take auto, none, required or a tool ({known})"
        raise ApiError(400, message, "tool_choice")

    def parse(text: str) -> list[Call]:
        return [Call(name, text.strip())] if _objects(text) else []

    return tools, Form("", "", parse, at_start=True), _arguments(named[name])


def _arguments(function: ToolFunction) -> dict[str, Any]:
    return function.parameters or {"type": "object"}


def _any_call(named: Mapping[str, ToolFunction]) -> dict[str, Any]:
    """The schema of a call of any of the functions.

    Definitions go to its root, where references look for them.
    """
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for name, function in named.items():
        arguments = dict(_arguments(function))
        for other, definition in arguments.pop("$defs", {}).items():
            if definitions.setdefault(other, definition) != definition:
                raise ApiError(400, f"two tools define {other!r:.80} differently", "tools")
        properties = {"name": {"const": name}, "arguments": arguments}
        call = {"type": "object", "properties": properties, "required": ["name", "arguments"]}
        calls.append(call | {"additionalProperties": False})
    return {"anyOf": calls, "$defs": definitions} if definitions else {"anyOf": calls}
