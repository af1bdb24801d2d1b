"""Which tools the model may call, or must: `tool_choice`.

Where it must call one, the answer is held to a JSON schema, and is the call.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treespec.serve.errors import ApiError
from treespec.serve.schema import ChatRequest, Tool, ToolFunction
from treespec.serve.tools import Call, Form, calls_in


@dataclass(frozen=True)
class Choice:
    """tools: shown to the template. form: of calls in the answer, where one must come; None: the
    template's own. schema: of the answer, where a call must come.
    """

    tools: Sequence[Tool] = ()
    form: Form | None = None
    schema: dict[str, Any] | None = None


def choice_of(asked: ChatRequest) -> Choice:
    """Raises ApiError for a choice that names no tool, and beside another format."""
    # 1. Tools that may be called, or none.
    tools, wanted = asked.tools or [], asked.tool_choice
    if wanted in (None, "auto", "none"):
        return Choice() if wanted == "none" else Choice(tools)
    format = asked.response_format
    if asked.regex or asked.grammar or (format and format.type != "text"):
        message = "a tool that must be called fixes the format of the answer: leave out another"
        raise ApiError(400, message, "tool_choice")

    # 2. Any of them.
    named = {tool.function.name: tool.function for tool in tools}
    if wanted == "required" and tools:
        return Choice(tools, Form("", "", calls_in, at_start=True), _any_call(named))

    # 3. One by its name.
    function = wanted.get("function") if isinstance(wanted, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in named:
        known = ", ".join(named) or "no tools are given"
        message = f"tool_choice is {wanted!r:.80}: take auto, none, required or a tool ({known})"
        raise ApiError(400, message, "tool_choice")

    def parse(text: str) -> list[Call]:
        return [Call(name, text.strip())] if _is_json(text) else []

    return Choice(tools, Form("", "", parse, at_start=True), _arguments(named[name]))


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


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
