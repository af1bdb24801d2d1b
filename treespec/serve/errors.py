"""Errors as OpenAI's API writes them: a status, and `{"error": {message, type, param, code}}`."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, final

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from treespec.engine.options import REQUEST_OPTION_NAMES
from treespec.errors import InputError, TooLong
from treespec.files.printable import to_one_line

log = logging.getLogger(__name__)

# Messages of treespec begin with an option's name: the request's field of each option.
FIELD_OF_OPTION = {name: name for name in REQUEST_OPTION_NAMES}
FIELD_OF_OPTION |= {"seed": "seed", "json_schema": "response_format", "pictures": "messages"}


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
        super().__init__(status, message, headers)
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error"
        if self.status_code == 429:
            kind = "rate_limit_error"
        elif self.status_code >= 500:
            kind = "server_error"
        message = to_one_line(str(self.detail))
        fields = {"message": message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}


def build_bad_request(error: BaseException, param: str | None = None) -> ApiError:
    """The 400 for an input that treespec refuses.

    param: the request's field, unless the message begins with an option's name.
    """
    code = None
    if isinstance(error, TooLong):
        code = "context_length_exceeded"
    return ApiError(400, str(error), _find_field(error) or param, code)


def _find_field(error: BaseException) -> str | None:
    """The request's field of the option that a message begins with."""
    return FIELD_OF_OPTION.get(str(error).partition(" ")[0].rstrip(":,"))


def to_api_error(error: Exception) -> ApiError:
    """The error that a client gets for any error, before or amid an answer.

    It gives the reason if that was written for people; the log has the others. Clients send a
    request again after a 500, so an error that the request itself causes is a 400.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return build_invalid_error(error.errors())
    if isinstance(error, HTTPException):
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = "Invalid URL"
        return ApiError(error.status_code, message, headers=error.headers)
    if isinstance(error, InputError):
        if _find_field(error):
            return build_bad_request(error)
        return ApiError(500, str(error))
    log.error("an answer failed: %s: %s", type(error).__name__, error)
    return ApiError(500, f"the answer failed ({type(error).__name__}): the server's log says more")


async def handle_error(_: Request, error: Exception) -> JSONResponse:
    """Every error of the application gets OpenAI's body."""
    return build_error_response(to_api_error(error))


def build_error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status_code, error.headers)


def build_invalid_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
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
    problem = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"Invalid '{param}': {problem}", param, "invalid_value")


def name_of(location: Sequence[str | int]) -> str | None:
    """`messages[1].content` for pydantic's location of an error; None for the whole body."""
    name = ""
    for part in location[1:]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "constrained"):
            name += f".{part}"
    if not name:
        return None
    return name.removeprefix(".")
