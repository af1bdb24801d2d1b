"""Read the JSON body of a request: on the event loop if it is small, else on a thread in the request's lane.

Parsing holds the interpreter, and with it everybody, so a body is bounded twice: by its bytes (guard.py), and by its
JSON values, which are counted before anything is built.
"""

import json
from collections.abc import Callable
from email.message import Message
from functools import partial
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from treespec.files.pauses import take_pause
from treespec.serve.errors import NO_OBJECT, ApiError, build_invalid_error

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")
LOOP_BYTES = 1 << 14  # a body up to this size is parsed on the event loop
MAX_JSON_VALUES = 1 << 17


async def read_body(request: Request, schema: type[B]) -> B:
    """Read a request's body. Raises ApiError for one that does not follow the schema; TimeoutError at the deadline."""
    # Pages of other origins may send a text without asking the server first, but no JSON.
    content = await request.body()
    if not is_json_type(request.headers.get("content-type", "")):
        raise ApiError(400, NO_OBJECT)
    return await run_by_size(request, partial(parse_body, content, schema))


async def run_by_size(request: Request, call: Callable[[], T]) -> T:
    """Run what takes the longer the larger the request's body is: on a thread in the lane unless the body is small."""
    if len(await request.body()) <= LOOP_BYTES:
        return call()
    result: T = await request.state.place.run(call)
    return result


def is_json_type(content_type: str) -> bool:
    """Whether the Content-Type header of a request says that its body is JSON."""
    message = Message()
    message["content-type"] = content_type
    kind = message.get_content_type()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


def parse_body(content: bytes, schema: type[B]) -> B:
    """Parse a JSON text, and check it. Raises ApiError."""
    # 1. The number of values.
    if has_many_values(content):
        raise ApiError(
            413, f"the body holds more than this server's limit of {MAX_JSON_VALUES} JSON values"
        )

    # 2. The JSON.
    take_pause()
    try:
        fields = json.loads(content)
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is no JSON: {error.msg}") from None
    except (ValueError, RecursionError):
        raise ApiError(400, "the body cannot be parsed as JSON") from None

    # 3. The schema.
    take_pause()
    return validate_fields(fields, schema)


def validate_fields(fields: object, schema: type[B]) -> B:
    """Check the fields of a body. Raises ApiError."""
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise build_invalid_error(error.errors(include_url=False, include_input=False)) from None


def has_many_values(content: bytes) -> bool:
    """Whether a JSON text holds more than `MAX_JSON_VALUES` values. It is not parsed."""
    if count_openings(content) <= MAX_JSON_VALUES:  # even with those within strings
        return False
    if content.count(b'"') > 4 * MAX_JSON_VALUES:  # a value has at most two strings, with its key
        return True
    return count_openings(remove_strings(content)) > MAX_JSON_VALUES


def count_openings(content: bytes) -> int:
    """Count the characters after which a value begins: `[`, `{` and commas."""
    return content.count(b",") + content.count(b"[") + content.count(b"{")


def remove_strings(content: bytes) -> bytes:
    """Leave the strings of a JSON text out: {"a": ["x, y", 2]} becomes {: [, 2]}."""
    plain = content.replace(b"\\\\", b"").replace(b'\\"', b"")  # quotes within strings
    return b"".join(plain.split(b'"')[::2])
