"""Messages and tools of a request as the chat template takes them, and their token ids."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from treespec.api.spec import Spec
from treespec.errors import InputError
from treespec.serve.errors import ApiError, refused
from treespec.serve.schema import Message, Tool, ToolCall
from treespec.serve.tools import has_place, taught, written
from treespec.text import templates


def encoded(
    spec: Spec,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """The token ids of a conversation. Raises ApiError for what the template refuses.

    variables: of the template, such as enable_thinking.
    """
    tokenizer = spec.target.tokenizer
    if tokenizer is None:
        raise ApiError(400, "the target has no tokenizer: send token ids to /v1/completions")
    given = [tool.model_dump(exclude_unset=True) for tool in tools]
    source = source_of(spec, tools)
    plain = [_plain(message, place, source) for place, message in enumerate(messages)]
    if not has_place(source):
        plain, given = _told(plain, given), []
    try:
        return templates.encode(
            tokenizer,
            plain,
            spec.template,
            spec.target.context_length,
            tools=given or None,
            chat_template_kwargs=variables,
        )
    except InputError as error:
        raise refused(error, "messages") from error


def _told(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with tools, calls and results in their text. Tools end the system message."""
    messages = [written(message) for message in messages]
    if not tools:
        return messages
    begun = messages[0]["content"] + "\n\n" if messages[0]["role"] == "system" else ""
    rest = messages[1:] if begun else messages
    return [{"role": "system", "content": begun + taught(tools)}, *rest]


def source_of(spec: Spec, tools: Sequence[Tool] = ()) -> str:
    """The Jinja source of the template; "" for one of fschat's."""
    if spec.template is not None or not getattr(spec.target.tokenizer, "chat_template", None):
        return ""
    tokenizer: Any = spec.target.tokenizer
    return str(
        tokenizer.get_chat_template(
            tools=[tool.model_dump(exclude_unset=True) for tool in tools] or None
        )
    )


def _plain(message: Message, place: int, source: str) -> dict[str, Any]:
    """One message as templates take it: content a string, arguments of calls as objects."""
    fields = message.model_dump(exclude_none=True)
    if message.role == "developer" and "developer" not in source:
        fields["role"] = "system"
    if message.content is None:
        if message.role != "assistant":
            raise ApiError(400, "a message without content", f"messages[{place}].content")
        fields["content"] = ""
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        where = f"messages[{place}].tool_calls"
        fields["tool_calls"] = [_call(call, f"{where}[{number}]") for number, call in calls]
    return fields


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        name = f"{where}.function.arguments"
        raise ApiError(400, f"Invalid '{name}': it must be JSON", name, "invalid_value") from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})
