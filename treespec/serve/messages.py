"""Convert the messages and tools of a request to the chat template's form, and encode them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from treespec.api.spec import Spec
from treespec.errors import InputError, TooLong
from treespec.sampling.compiled_grammar import GRAMMAR_KINDS
from treespec.serve.errors import ApiError
from treespec.serve.protocol import Fields
from treespec.serve.schema import ChatRequest, Message, Sampled, Tool, ToolCall
from treespec.serve.tool_forms import (
    JSON_CALLS,
    ToolFormat,
    adapt_call_ids,
    detect_tool_form,
    has_place,
)
from treespec.serve.tool_syntax import ParsedToolCall, Schemas, parse_json_values
from treespec.text import templates
from treespec.text.pictures import has_pictures
from treespec.text.prompts import encode_prompt

TOOLS_PROMPT = """\
You may call functions to help with the user's question. These are their signatures:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments between tags:
<tool_call>
{"name": "<name>", "arguments": {<arguments>}}
</tool_call>
The results follow between <tool_response> tags."""


def encode_request(
    spec: Spec,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Encode a conversation as token ids.

    Args:
        spec: its target's tokenizer and its template are used.
        messages: the validated messages.
        tools: the validated tools. Default: ().
        variables: variables of the chat template, such as enable_thinking. Default: None.

    Raises:
        InputError: for messages that the template refuses.
        ApiError: for a message without content, and for a tool call whose arguments are no JSON.
    """
    tokenizer = spec.target.tokenizer
    source = templates.get_template_source(tokenizer, spec.template, tools)
    if has_pictures(messages):
        if tools:
            raise InputError("a message with pictures goes without tools")
        chat = templates.adapt_roles([dict(message) for message in messages], source)
        return encode_prompt(spec.target, chat, spec.template, variables)
    if tokenizer is None:
        raise InputError("the target has no tokenizer: send token ids to /v1/completions")
    chat = [_normalize_message(message, index) for index, message in enumerate(messages)]
    chat = templates.adapt_roles(chat, source)
    if not has_place(source):
        chat = _write_tools_as_text(chat, tools)
        tools = ()
    form = detect_tool_form(source)
    if form is not None and form.id_pattern:
        chat = adapt_call_ids(chat, form.id_pattern)
    encode = partial(
        templates.encode_messages,
        tokenizer,
        template=spec.template,
        context=spec.target.context_length,
        tools=tools,
        chat_template_kwargs=variables,
    )
    try:
        return encode(chat)
    except TooLong:
        raise
    except InputError:
        # DeepSeek's templates write arguments as they come, and refuse objects: give them text.
        text_chat = _write_arguments_as_text(chat)
        if text_chat == chat:
            raise
        return encode(text_chat)


def _write_arguments_as_text(messages: Sequence[Fields]) -> list[Fields]:
    """Write the arguments of tool calls as JSON text."""
    written = []
    for message in messages:
        fields = dict(message)
        calls = []
        for call in fields.get("tool_calls", []):
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            calls.append(call | {"function": call["function"] | {"arguments": arguments}})
        if calls:
            fields["tool_calls"] = calls
        written.append(fields)
    return written


def _normalize_message(message: Message, index: int) -> Fields:
    """Convert a message to the template's form: content is a string, arguments of tool calls are objects.

    index: the message's index in the request, for errors. Raises ApiError.
    """
    fields: Fields = {name: value for name, value in message.items() if value is not None}
    if fields["role"] == "function":  # OpenAI's name before `tool`
        fields["role"] = "tool"
    if "function_call" in fields:
        fields["tool_calls"] = [{"function": fields.pop("function_call")}]
    if "content" not in fields and fields["role"] != "assistant":
        raise ApiError(400, "a message without content", f"messages[{index}].content")
    calls = []
    for number, call in enumerate(fields.pop("tool_calls", [])):
        calls.append(_parse_call(call, f"messages[{index}].tool_calls[{number}]"))
    if calls:
        fields["tool_calls"] = calls
    return {"content": "", **fields}


def _parse_call(call: ToolCall, name: str) -> Fields:
    """Parse the arguments of a tool call in an earlier answer. name: the field that an error names. Raises ApiError."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        param = f"{name}.function.arguments"
        problem = f"Invalid '{param}': it must be JSON"
        raise ApiError(400, problem, param, "invalid_value") from None
    fields: Fields = {"type": "function"}
    fields["function"] = {"name": function["name"], "arguments": arguments}
    if call.get("id"):
        fields["id"] = call["id"]
    return fields


def _write_tools_as_text(messages: list[Fields], tools: Sequence[Tool]) -> list[Fields]:
    """Write tools, calls and results into the text of the messages; tools go to the end of the system message."""
    messages = [write_message_as_text(message) for message in messages]
    if not tools:
        return messages
    system = ""
    if messages[0]["role"] == "system":
        system = messages[0]["content"] + "\n\n"
        messages = messages[1:]
    lines = [json.dumps(tool, ensure_ascii=False) for tool in tools]
    system += TOOLS_PROMPT.replace("{tools}", "\n".join(lines))
    return [{"role": "system", "content": system}] + messages


def write_message_as_text(message: Fields) -> Fields:
    """Write the tool calls of a message, or the result of a call, as text in Hermes' format."""
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    fields = dict(message)
    texts = []
    if content:
        texts.append(content)
    for call in fields.pop("tool_calls", []):
        text = json.dumps(call["function"], ensure_ascii=False)
        texts.append(f"<tool_call>\n{text}\n</tool_call>")
    fields["content"] = "\n".join(texts)
    return fields


@final
@dataclass(frozen=True)
class ParsedToolChoice:
    """What a request's `tools` and `tool_choice` ask for.

    Attributes:
        tools: the tools that the template shows.
        form: the format of calls if the answer must be a call; else None.
        schema: JSON schema of the answer if the answer must be a call; else None.
    """

    tools: Sequence[Tool]
    form: ToolFormat | None = None
    schema: Fields | None = None


def parse_tool_choice(body: ChatRequest) -> ParsedToolChoice:
    """Read `tools` and `tool_choice` of a request.

    Raises: ApiError for a choice that names no tool, and for a required call together with another response format.
    """
    tools = body.tools or []
    tool_choice: Any = body.tool_choice
    if isinstance(tool_choice, dict) and tool_choice["type"] == "allowed_tools":
        allowed = tool_choice["allowed_tools"]
        tools = select_tools(tools, [tool["function"]["name"] for tool in allowed["tools"]])
        tool_choice = allowed["mode"]
    if tool_choice == "none":
        return ParsedToolChoice([])
    if tool_choice is None or tool_choice == "auto":
        return ParsedToolChoice(tools)
    # `response_format` is of a text, which there is none of: instructor sends both.
    if not set(GRAMMAR_KINDS).isdisjoint(Sampled.to_options(body)):
        message = "a tool that must be called fixes the format of the answer: leave out another"
        raise ApiError(400, message, "tool_choice")
    return require_call(tools, tool_choice)


def select_tools(tools: Sequence[Tool], names: Sequence[str]) -> list[Tool]:
    """Select tools by their names. Raises ApiError for a name that no tool has."""
    functions = {tool["function"]["name"]: tool for tool in tools}
    for name in names:
        if name not in functions:
            raise ApiError(400, f"tool_choice allows {name!r:.80}, which no tool is", "tool_choice")
    return [functions[name] for name in dict.fromkeys(names)]


def list_schemas(tools: Sequence[Tool]) -> dict[str, Fields]:
    """Map each function's name to the JSON schema of its arguments."""
    schemas: dict[str, Fields] = {}
    for tool in tools:
        function = tool["function"]
        schemas[function["name"]] = function.get("parameters") or {"type": "object"}
    return schemas


def require_call(tools: Sequence[Tool], tool_choice: str | Tool) -> ParsedToolChoice:
    """Build the choice of a request whose answer must be a tool call.

    tool_choice: the tool to call, or "required" for any tool. Raises ApiError for a choice that names no tool.
    """
    # 1. Any tool.
    schemas = list_schemas(tools)
    if tool_choice == "required" and tools:
        return ParsedToolChoice(tools, JSON_CALLS, _build_any_call_schema(schemas))

    # 2. The named tool.
    name = ""
    if isinstance(tool_choice, dict):
        name = tool_choice["function"]["name"]
    if name not in schemas:
        names = ", ".join(schemas) or "no tools are given"
        message = (
            f"tool_choice is {tool_choice!r:.80}: take auto, none, required or a tool ({names})"
        )
        raise ApiError(400, message, "tool_choice")
    form = ToolFormat("", "", ("",), partial(_parse_arguments, name), at_start=True)
    return ParsedToolChoice(tools, form, schemas[name])


def _parse_arguments(name: str, text: str, schemas: Schemas) -> list[ParsedToolCall]:
    """The call of the tool `name`, with the whole text as its arguments; [] for an empty text."""
    if not parse_json_values(text):
        return []
    return [ParsedToolCall(name, text)]


def _build_any_call_schema(schemas: Mapping[str, Fields]) -> Fields:
    """Build the JSON schema of a call of any function. schemas: the schema of each function's arguments, by name.

    Definitions move to the root of the schema, where `$ref` looks for them. Raises ApiError if two tools define a
    name differently.
    """
    calls: list[Fields] = []
    definitions: Fields = {}
    for name, schema in schemas.items():
        arguments = dict(schema)
        for definition_name, definition in arguments.pop("$defs", {}).items():
            if definitions.setdefault(definition_name, definition) != definition:
                raise ApiError(
                    400, f"two tools define {definition_name!r:.80} differently", "tools"
                )
        properties = {"name": {"const": name}, "arguments": arguments}
        call = {"type": "object", "properties": properties, "required": ["name", "arguments"]}
        calls.append(call | {"additionalProperties": False})
    any_call: Fields = {"anyOf": calls}
    if definitions:
        any_call["$defs"] = definitions
    return any_call
