"""Errors as OpenAI's API writes them: a status, and `{"error": {message, type, param, code}}`."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, final

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from treespec.engine.options import NAMES
from treespec.errors import InputError, TooLong
from treespec.files.printable import one_line

log = logging.getLogger(__name__)

# The request's field of the option that a message of treespec begins with.
FIELDS = {name: name for name in (*NAMES, "seed")}
FIELDS |= {"json_schema": "response_format", "pictures": "messages"}


@final
class ApiError(HTTPException):
    """An error with its status. param: the request's field. code: one of OpenAI's, if any fits."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status_code == 429 else kind
        message = one_line(str(self.detail))
        told = {"message": message, "type": kind, "param": self.param, "code": self.code}
        return {"error": told}


def refused(error: BaseException, param: str | None = None) -> ApiError:
    """An input that treespec refuses is the request's fault.

    param: the field, unless the message begins with an option's name.
    """
    code = "context_length_exceeded" if isinstance(error, TooLong) else None
    return ApiError(400, str(error), _field(error) or param, code)


def _field(error: BaseException) -> str | None:
    """The request's field of the option that a message begins with."""
    return FIELDS.get(str(error).partition(" ")[0].rstrip(":,"))


def failed(error: Exception) -> ApiError:
    """Any error, before or amid an answer. People see the reason if it was written for them.

    Clients send a request again after a 500, so what the request itself causes is a 400.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return invalid(error.errors())
    if isinstance(error, HTTPException):
        message = "Invalid URL" if error.status_code in (404, 405) else str(error.detail)
        return ApiError(error.status_code, message, headers=error.headers)
    if isinstance(error, InputError):
        return refused(error) if _field(error) else ApiError(500, str(error))
    log.error("an answer failed: %s: %s", type(error).__name__, error)
    return ApiError(500, f"the answer failed ({type(error).__name__}): the server's log says more")


async def handled(_: Request, error: Exception) -> JSONResponse:
    """Every error of the application gets OpenAI's body."""
    return response(failed(error))


def response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status_code, dict(error.headers or {}))


def invalid(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of pydantic's errors, with the name of the field."""
    first = errors[0]
    param = name_of(first["loc"])
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first['ctx']['error']}")
    if first["type"] == "unknown_field":
        name = first["ctx"]["name"]
        hint = first["ctx"]["hint"]
        return ApiError(400, f"Unknown parameter: '{name}'{hint}", name, "unknown_parameter")
    if param is None:
        return ApiError(400, "the body must be a JSON object (Content-Type: application/json)")
    if first["type"] == "missing":
        return ApiError(400, f"Missing required parameter: '{param}'", param, "missing_parameter")
    told = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"Invalid '{param}': {told}", param, "invalid_value")


def name_of(place: Sequence[str | int]) -> str | None:
    """`messages[1].content` for pydantic's place of an error; None for the whole body."""
    name = ""
    for part in place[1:]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "constrained"):
            name += f".{part}" if name else part
    return name or None
