"""Parse tool calls in the text of an answer, in the format that the model's chat template shows.

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
    """A tool call. arguments: a JSON text."""

    name: str
    arguments: str

    @property
    def fields(self) -> dict[str, Any]:
        """The call in the fields of OpenAI's API, with a new id."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


@dataclass(frozen=True)
class ToolFormat:
    """How answers write tool calls.

    Attributes:
        mark: a template whose source holds this text uses this format.
        opening: the text or special token at which calls begin.
        parse: parses the text from `opening` on into calls; returns [] or raises ValueError if it holds none.
        at_start: whether calls may begin only at the start of an answer.
    """

    mark: str
    opening: str
    parse: Callable[[str], list[ParsedToolCall]]
    at_start: bool = False


def parse_json_values(text: str) -> list[Any]:
    """Parse JSON values that are separated by whitespace, commas or semicolons; lists are flattened.

    Raises: ValueError if any other text is between them.
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
    """Convert a value such as {"name": …, "arguments": …} to a call. Raises ValueError for any other value."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("no call")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        raise ValueError("no call")
    return ParsedToolCall(value["name"], arguments)


def _parse_hermes(text: str) -> list[ParsedToolCall]:
    """Parse calls such as <tool_call>{"name": …, …}</tool_call>."""
    calls = []
    for body in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL):
        for value in parse_json_values(body):
            calls.append(_read_tool_call(value))
    return calls


def _parse_mistral(text: str) -> list[ParsedToolCall]:
    """Parse calls such as [TOOL_CALLS][{"name": …, …}] or [TOOL_CALLS]name[ARGS]{…}."""
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
    """Parse a text that holds only calls, written as JSON."""
    text = text.strip().removeprefix("<|python_tag|>")
    return [_read_tool_call(value) for value in parse_json_values(text)]


TOOL_FORMS = (
    ToolFormat("<tool_call>", "<tool_call>", _parse_hermes),
    ToolFormat("[TOOL_CALLS]", "[TOOL_CALLS]", _parse_mistral),
    ToolFormat('"parameters"', "{", parse_calls, at_start=True),
)


def detect_tool_form(source: str) -> ToolFormat | None:
    """Detect the tool format of a template from its source; None if it is unknown.

    For a template that cannot show tools the server writes them in Hermes' format.
    """
    if not has_place(source):
        return TOOL_FORMS[0]
    for form in TOOL_FORMS:
        if form.mark in source:
            return form
    return None


def has_place(source: str) -> bool:
    """Whether a template's source can show tools."""
    return re.search(r"\btools\b", source) is not None


@final
class ToolCallParser:
    """Splits the pieces of an answer into text to show and tool calls.

    Text from the opening on is held back until the answer ends, when it is parsed. Five pieces in Hermes' format:

        piece   Hi   " <to"   ol_call>   {"name": …}   </tool_call>
        shown   Hi   " "      -          -             -              then one call

    Args:
        form: the format of calls; None shows all text.
        tokenizer: decodes the tokens; None shows all text.
        most: maximum number of calls to return. Default: None, all.
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
        self.opening_id: int | None = None  # id of the opening, if that is a special token
        if tokenizer and form:
            self.opening_id = tokenizer.get_added_vocab().get(form.opening)

    def show(self, piece: Piece) -> str:
        """Add a piece. Returns the text that may be shown now."""
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
        """End the answer. Returns (text that is still to be shown, calls)."""
        # 1. Parse the calls.
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

        # 2. Show the rest of the text before them. Only the piece with a special opening token may have held some back.
        if not calls:
            return self.held, []
        if self.opening_id not in self.tokens:
            return "", calls
        tokens_before = self.tokens[: self.tokens.index(self.opening_id)]
        text = str(decode(tokens_before, skip_special_tokens=True))
        return text[self.shown :], calls

    def _find_border(self, form: ToolFormat, piece: Piece) -> int:
        """Count the held characters that may be shown: those before the opening, or before a possible start of it."""
        # 1. Show nothing once calls have begun.
        if self.opened or self.opening_id in piece.token_ids:
            self.opened = True
            return 0

        # 2. If calls begin only at the start of an answer, decide by its first character.
        if form.at_start:
            answer_start = self.held.lstrip()
            self.opened = answer_start.startswith(form.opening)
            if answer_start and not self.opened:
                self.form = None
                return len(self.held)
            return 0

        # 3. Else the opening may be anywhere.
        opening_start = self.held.find(form.opening)
        if opening_start >= 0:
            self.opened = True
            return opening_start
        return len(self.held) - count_suffix_overlap(self.held, form.opening)
