"""Messages and tools of a request as the chat template takes them, and their token ids."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from treespec.api.spec import Spec
from treespec.errors import InputError
from treespec.sampling.compiled_grammar import KINDS
from treespec.serve.errors import ApiError
from treespec.serve.schema import ChatRequest, Message, Tool
from treespec.serve.tools import Call, Form, calls_in, has_place, values_in
from treespec.text import templates
from treespec.text.pictures import has_pictures
from treespec.text.prompts import encode

Fields = dict[str, Any]
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


def encoded(
    spec: Spec,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """The token ids of a conversation. Raises InputError for what the template refuses.

    messages, tools: as their schemas leave them. variables: of the template, such as enable_thinking.
    """
    tokenizer = spec.target.tokenizer
    context = spec.target.context_length
    source = templates.source_of(tokenizer, spec.template, tools)
    if has_pictures(messages):
        if tools:
            raise InputError("a message with pictures goes without tools")
        talk = templates.adapt_roles([{**message} for message in messages], source)
        return encode(spec.target, talk, spec.template, variables)
    if tokenizer is None:
        raise InputError("the target has no tokenizer: send token ids to /v1/completions")
    plain = [_plain(message, place) for place, message in enumerate(messages)]
    plain = templates.adapt_roles(plain, source)
    if not has_place(source):
        plain = _told(plain, tools)
        tools = ()
    options: Fields = {"tools": tools, "chat_template_kwargs": variables}
    return templates.encode(tokenizer, plain, spec.template, context, **options)


def _plain(message: Message, place: int) -> Fields:
    """One message as templates take it: content a string, arguments of calls as objects."""
    fields: Fields = {name: value for name, value in message.items() if value is not None}
    if "content" not in fields and fields["role"] != "assistant":
        raise ApiError(400, "a message without content", f"messages[{place}].content")
    calls = []
    for number, call in enumerate(fields.pop("tool_calls", ())):
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            name = f"messages[{place}].tool_calls[{number}].function.arguments"
            told = f"Invalid '{name}': it must be JSON"
            raise ApiError(400, told, name, "invalid_value") from None
        function = {"name": function["name"], "arguments": arguments}
        own = {"id": call["id"]} if call.get("id") else {}
        calls.append({"type": "function", "function": function} | own)
    return {"content": "", **fields, **({"tool_calls": calls} if calls else {})}


def _told(messages: list[Fields], tools: Sequence[Tool]) -> list[Fields]:
    """The messages with tools, calls and results in their text. Tools end the system message."""
    messages = [written(message) for message in messages]
    if not tools:
        return messages
    begun = messages[0]["content"] + "\n\n" if messages[0]["role"] == "system" else ""
    rest = messages[1:] if begun else messages
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return [{"role": "system", "content": begun + TEACHING.replace("{tools}", lines)}, *rest]


def written(message: Fields) -> Fields:
    """A message with its calls, or the result of one, as text in Hermes' form."""
    content = message["content"]
    calls = message.get("tool_calls") or ()
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    texts = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
    marked = [f"<tool_call>\n{text}\n</tool_call>" for text in texts]
    fields = {name: value for name, value in message.items() if name != "tool_calls"}
    return fields | {"content": "\n".join([*([content] if content else []), *marked])}


Choice = tuple[Sequence[Tool], Form | None, Fields | None]


def choice_of(asked: ChatRequest) -> Choice:
    """(tools that the template shows, form of the calls, schema of the answer).

    Form and schema are None but where a call must come. Raises ApiError for a choice that names no
    tool, and beside another format.
    """
    # 1. Tools that may be called, or none.
    tools = asked.tools or []
    wanted = asked.tool_choice
    if wanted in (None, "auto", "none"):
        return ([] if wanted == "none" else tools), None, None
    if any(kind in asked.options() for kind in KINDS):
        message = "a tool that must be called fixes the format of the answer: leave out another"
        raise ApiError(400, message, "tool_choice")

    # 2. Any of them.
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    named = {name: of.get("parameters") or {"type": "object"} for name, of in functions.items()}
    if wanted == "required" and tools:
        return tools, Form("", "", calls_in, at_start=True), _any_call(named)

    # 3. One by its name.
    name = wanted["function"]["name"] if isinstance(wanted, dict) else ""
    if name not in named:
        known = ", ".join(named) or "no tools are given"
        message = f"tool_choice is {wanted!r:.80}: take auto, none, required or a tool ({known})"
        raise ApiError(400, message, "tool_choice")

    form = Form("", "", lambda text: [Call(name, text)] if values_in(text) else [], at_start=True)
    return tools, form, named[name]


def _any_call(schemas: Mapping[str, Fields]) -> Fields:
    """The schema of a call of any of the functions, by the schemas of their arguments.

    Definitions go to its root, where references look for them.
    """
    calls: list[Fields] = []
    definitions: Fields = {}
    for name, schema in schemas.items():
        arguments = dict(schema)
        for other, definition in arguments.pop("$defs", {}).items():
            if definitions.setdefault(other, definition) != definition:
                raise ApiError(400, f"two tools define {other!r:.80} differently", "tools")
        properties = {"name": {"const": name}, "arguments": arguments}
        call = {"type": "object", "properties": properties, "required": ["name", "arguments"]}
        calls.append(call | {"additionalProperties": False})
    return {"anyOf": calls, "$defs": definitions} if definitions else {"anyOf": calls}
