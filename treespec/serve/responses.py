"""The endpoint /v1/responses: OpenAI's Responses API over the same answers as /v1/chat/completions."""

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from treespec.serve.bodies import read_body, run_by_size, validate_fields
from treespec.serve.completions import begin_chat
from treespec.serve.errors import ApiError
from treespec.serve.protocol import Fields
from treespec.serve.response_events import ResponseEvents
from treespec.serve.schema import ChatRequest, Items, StrictBody
from treespec.serve.streaming import stream_events

router = APIRouter()
STATELESS_MESSAGE = "this server keeps no conversations: send all of it as input"
CHAT_FIELDS = {  # field of /v1/responses -> that of /v1/chat/completions
    "model": "model",
    "max_output_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "parallel_tool_calls": "parallel_tool_calls",
}


class ResponsesRequest(StrictBody):
    """The body of /v1/responses. `include`, `truncation` and the like change no token here."""

    input: str | Items[dict[str, Any]]
    instructions: str | None = None
    model: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | int | None = None
    top_p: float | int | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: Literal[False] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Items[str] | None = None
    metadata: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None
    top_logprobs: Literal[0] | None = None


@router.post("/v1/responses")
async def respond_to_input(request: Request) -> Response:
    """Answer a conversation in the form of the Responses API."""
    body = await read_body(request, ResponsesRequest)
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise ApiError(400, f"{name}: {STATELESS_MESSAGE}", name)
    chat_body = await run_by_size(request, partial(to_chat_request, body))
    reply = await begin_chat(request, chat_body)
    heading = build_heading(body, reply.answers.state.name)
    events = ResponseEvents(heading)
    if body.stream:
        return stream_events(stream_response(events, reply.stream_chunks()))
    chat = await reply.collect_reply()
    choice = chat["choices"][0]
    events.begin()
    events.add_delta(choice["message"], choice["finish_reason"])
    events.finish(chat["usage"])
    return JSONResponse(events.response)


async def stream_response(
    events: ResponseEvents, chunks: AsyncIterator[Fields | None]
) -> AsyncIterator[Fields | None]:
    """Convert the chunks of a chat to the events of a response."""
    for event in events.begin():
        yield event
    usage: Fields = {}
    async for chunk in chunks:
        if chunk is None:
            yield None
            continue
        if chunk.get("usage"):
            usage = chunk["usage"]
        for choice in chunk["choices"]:
            for event in events.add_delta(choice["delta"], choice["finish_reason"]):
                yield event
    for event in events.finish(usage):
        yield event


def build_heading(body: ResponsesRequest, model: str) -> Fields:
    """Build the fields of a response that are known before its answer."""
    heading: Fields = {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
    }
    for name in ("metadata", "reasoning", "text", "tool_choice", "tools"):
        value = getattr(body, name)
        if value is not None:
            heading[name] = value
    return heading


def to_chat_request(body: ResponsesRequest) -> ChatRequest:
    """Convert a request of the Responses API to one of chat completions. Raises ApiError."""
    # 1. Messages.
    messages: list[Fields] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += to_messages(body.input)

    # 2. Fields with another name or form.
    fields: Fields = {"messages": messages, "stream": body.stream}
    for name, chat_name in CHAT_FIELDS.items():
        fields[chat_name] = getattr(body, name)
    if body.stream:
        fields["stream_options"] = {"include_usage": True}
    if body.tools:
        fields["tools"] = [convert_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    fields["tool_choice"] = convert_tool_choice(body.tool_choice)
    if body.text is not None:
        fields["verbosity"] = body.text.get("verbosity")
        fields["response_format"] = convert_text_format(body.text.get("format"))
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.get("effort")

    # 3. Its own checks.
    return validate_fields(fields, ChatRequest)


def convert_text_format(text_format: Mapping[str, Any] | None) -> Fields | None:
    """Convert `text.format` of the Responses API to `response_format` of chats."""
    if text_format is None:
        return None
    if text_format.get("type") != "json_schema":
        return dict(text_format)
    schema = {name: value for name, value in text_format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def convert_tool(tool: Mapping[str, Any], name: str) -> Fields:
    """Convert a function of the Responses API to a tool of chats. Raises ApiError for a tool of another kind."""
    if tool.get("type") != "function":
        raise ApiError(
            400, f"{name} is of type {tool.get('type')!r:.40}, only functions run here", name
        )
    function = {key: value for key, value in tool.items() if key not in ("type", "strict")}
    return {"type": "function", "function": function}


def convert_tool_choice(choice: str | Mapping[str, Any] | None) -> Any:
    """Convert a tool choice of the Responses API to that of chats."""
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    if choice.get("type") == "allowed_tools" and "allowed_tools" not in choice:
        tools = [convert_tool_choice(tool) for tool in choice.get("tools", [])]
        allowed = {"mode": choice.get("mode", "auto"), "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def to_messages(items: Sequence[Mapping[str, Any]]) -> list[Fields]:
    """Convert the items of an input to messages. Raises ApiError for an item of an unknown type."""
    messages: list[Fields] = []
    thought = ""
    for index, item in enumerate(items):
        if item.get("type") == "reasoning":
            thought = read_thought(item)
            continue
        message = to_message(item, f"input[{index}].type")
        if thought and message["role"] == "assistant":
            message["reasoning_content"] = thought
            thought = ""
        calls = message.get("tool_calls")
        if calls and messages and messages[-1]["role"] == "assistant":  # of one answer
            messages[-1].setdefault("tool_calls", []).extend(calls)
        else:
            messages.append(message)
    return messages


def read_thought(item: Mapping[str, Any]) -> str:
    """The text of an item that holds a thought."""
    texts = []
    for name in ("content", "summary"):
        for part in item.get(name) or ():
            texts.append(str(part.get("text", "")))
    return "\n".join(texts)


def to_message(item: Mapping[str, Any], name: str) -> Fields:
    """Convert an item to a message. name: the field of its type, for the ApiError of an unknown one."""
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item.get("role"), "content": to_content(item.get("content"))}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        content = to_content(item.get("output"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    raise ApiError(400, f"{name} is {kind!r:.40}, which this server does not know", name)


def to_content(content: Any) -> Any:
    """Convert the content of a message: parts input_text, output_text and input_image have other names in chats."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = None
        if isinstance(part, dict):
            kind = part.get("type")
        if kind in ("input_text", "output_text"):
            parts.append({"type": "text", "text": part.get("text")})
        elif kind == "input_image":
            parts.append({"type": "image_url", "image_url": {"url": part.get("image_url")}})
        else:
            parts.append(part)
    return parts
