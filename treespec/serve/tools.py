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
from treespec.text.strings import beginning

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
    on; [] or a ValueError where there are none.
    """

    mark: str
    opening: str
    parse: Callable[[str], list[Call]]
    at_start: bool = False


def values_in(text: str) -> list[Any]:
    """JSON values that follow each other, separated by spaces, commas or semicolons.

    Raises ValueError if anything else lies between.
    """
    decoder = json.JSONDecoder()
    values = []
    while text := text.lstrip(" \t\r\n,;"):
        value, at = decoder.raw_decode(text)
        values += value if isinstance(value, list) else [value]
        text = text[at:]
    return values


def _call(value: Any) -> Call:
    """Raises ValueError for what is no call."""
    named = value if isinstance(value, dict) else {}
    arguments = named.get("arguments", named.get("parameters", {}))
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str) or not isinstance(named.get("name"), str):
        raise ValueError("no call")
    return Call(named["name"], arguments)


def _hermes(text: str) -> list[Call]:
    bodies = re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL)
    return [_call(value) for body in bodies for value in values_in(body)]


def _mistral(text: str) -> list[Call]:
    calls: list[Call] = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        name, marked, arguments = part.partition("[ARGS]")
        values = values_in(arguments if marked else part)
        named = [{"name": name.strip(), "arguments": value} for value in values]
        calls += map(_call, named if marked else values)
    return calls


def calls_in(text: str) -> list[Call]:
    """The calls of a text that is nothing but calls, as JSON."""
    return [_call(value) for value in values_in(text.strip().removeprefix("<|python_tag|>"))]


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
        self.form = form
        self.tokenizer = tokenizer
        self.most = most
        self.opened = False
        self.held = ""
        self.shown = 0
        self.tokens: list[int] = []
        added = tokenizer.get_added_vocab() if tokenizer and form else {}
        self.opening_id = added.get(form.opening) if form else None

    def show(self, piece: Piece) -> str:
        """The text that may be shown once this piece is there."""
        self.tokens += piece.token_ids
        self.held += piece.text
        border = self._border(self.form, piece) if self.form else len(self.held)
        text = self.held[:border]
        self.held = self.held[border:]
        self.shown += border
        return text

    def finish(self) -> tuple[str, list[Call]]:
        """At the end of an answer: the text still to show, and the calls."""
        # 1. The calls.
        if self.form is None or self.tokenizer is None or not self.opened:
            return self.held, []
        decode = partial(self.tokenizer.decode, clean_up_tokenization_spaces=False)
        whole = str(decode(self.tokens))
        for special in self.tokenizer.all_special_tokens:
            whole = whole.removesuffix(special)
        at = 0 if self.form.at_start else whole.find(self.form.opening)
        try:
            calls = self.form.parse(whole[at:])[: self.most]
        except (ValueError, RecursionError):
            calls = []

        # 2. The text before them: all is shown but what came with a special token that opens them.
        if not calls or self.opening_id not in self.tokens:
            return "" if calls else self.held, calls
        before = self.tokens[: self.tokens.index(self.opening_id)]
        return str(decode(before, skip_special_tokens=True))[self.shown :], calls

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
        return len(self.held) - beginning(self.held, form.opening)
