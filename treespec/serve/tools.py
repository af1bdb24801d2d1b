"""Calls of tools in the text of an answer, by the form that the model's chat template teaches.

<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>     Hermes, Qwen, SmolLM
[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]              Mistral
{"name": "f", "parameters": {"x": 1}}                           Llama 3
"""

import json
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

from treespec.engine.request import Piece
from treespec.text.strings import count_suffix_overlap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ParsedToolCall:
    """A call of a tool. arguments: as JSON."""

    name: str
    arguments: str

    @property
    def fields(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


@dataclass(frozen=True)
class ToolFormat:
    """How answers write calls of tools.

    mark: a text by which a template of this form is known. opening: the text or special token at
    which calls begin. parse: reads the calls from there on; it returns [] or raises ValueError for a
    text without calls. at_start: whether calls begin only at the start of an answer.
    """

    mark: str
    opening: str
    parse: Callable[[str], list[ParsedToolCall]]
    at_start: bool = False


def parse_json_values(text: str) -> list[Any]:
    """JSON values that follow each other, separated by spaces, commas or semicolons.

    Raises ValueError if anything else lies between.
    """
    decoder = json.JSONDecoder()
    values = []
    while text := text.lstrip(" \t\r\n,;"):
        value, end = decoder.raw_decode(text)
        if isinstance(value, list):
            values += value
        else:
            values.append(value)
        text = text[end:]
    return values


def _read_tool_call(value: Any) -> ParsedToolCall:
    """A call from a value such as {"name": …, "arguments": …}. Raises ValueError for another value."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("no call")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        raise ValueError("no call")
    return ParsedToolCall(value["name"], arguments)


def _parse_hermes(text: str) -> list[ParsedToolCall]:
    calls = []
    for body in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL):
        for value in parse_json_values(body):
            calls.append(_read_tool_call(value))
    return calls


def _parse_mistral(text: str) -> list[ParsedToolCall]:
    """Calls as [TOOL_CALLS][{"name": …, …}], or as [TOOL_CALLS]name[ARGS]{…}."""
    calls = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        name, separator, arguments = part.partition("[ARGS]")
        if separator:
            for value in parse_json_values(arguments):
                calls.append(_read_tool_call({"name": name.strip(), "arguments": value}))
        else:
            for value in parse_json_values(part):
                calls.append(_read_tool_call(value))
    return calls


def parse_calls(text: str) -> list[ParsedToolCall]:
    """The calls of a text that is nothing but calls, as JSON."""
    text = text.strip().removeprefix("<|python_tag|>")
    return [_read_tool_call(value) for value in parse_json_values(text)]


TOOL_FORMS = (
    ToolFormat("<tool_call>", "<tool_call>", _parse_hermes),
    ToolFormat("[TOOL_CALLS]", "[TOOL_CALLS]", _parse_mistral),
    ToolFormat('"parameters"', "{", parse_calls, at_start=True),
)


def detect_tool_form(source: str) -> ToolFormat | None:
    """The form that a template's source teaches, None for an unknown one.

    A template without a place for tools is taught Hermes' form.
    """
    if not has_place(source):
        return TOOL_FORMS[0]
    for form in TOOL_FORMS:
        if form.mark in source:
            return form
    return None


def has_place(source: str) -> bool:
    """Whether a template's source shows tools."""
    return re.search(r"\btools\b", source) is not None


@final
class ToolCallParser:
    """Splits the pieces of an answer into text to show and calls.

    form: None shows everything. Text from the opening on is held until the answer ends: only then
    is it known to be calls. most: the most calls to return; None for all.
    """

    def __init__(
        self,
        form: ToolFormat | None,
        tokenizer: "PreTrainedTokenizerBase | None",
        most: int | None = None,
    ) -> None:
        self.form = form
        self.tokenizer = tokenizer
        self.most = most
        self.opened = False
        self.held = ""
        self.shown = 0
        self.tokens: list[int] = []
        self.opening_id: int | None = None  # of an opening that is a special token
        if tokenizer and form:
            self.opening_id = tokenizer.get_added_vocab().get(form.opening)

    def show(self, piece: Piece) -> str:
        """The text that may be shown once this piece is there."""
        self.tokens += piece.token_ids
        self.held += piece.text
        border = len(self.held)
        if self.form:
            border = self._find_border(self.form, piece)
        text = self.held[:border]
        self.held = self.held[border:]
        self.shown += border
        return text

    def finish(self) -> tuple[str, list[ParsedToolCall]]:
        """At the end of an answer: the text still to show, and the calls."""
        # 1. The calls.
        if self.form is None or self.tokenizer is None or not self.opened:
            return self.held, []
        decode = partial(self.tokenizer.decode, clean_up_tokenization_spaces=False)
        text = str(decode(self.tokens))
        for special in self.tokenizer.all_special_tokens:
            text = text.removesuffix(special)
        if not self.form.at_start:
            text = text[text.find(self.form.opening) :]
        try:
            calls = self.form.parse(text)[: self.most]
        except (ValueError, RecursionError):
            calls = []

        # 2. The text before them: all is shown but what came with a special token that opens them.
        if not calls:
            return self.held, []
        if self.opening_id not in self.tokens:
            return "", calls
        before = self.tokens[: self.tokens.index(self.opening_id)]
        text = str(decode(before, skip_special_tokens=True))
        return text[self.shown :], calls

    def _find_border(self, form: ToolFormat, piece: Piece) -> int:
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
        return len(self.held) - count_suffix_overlap(self.held, form.opening)
