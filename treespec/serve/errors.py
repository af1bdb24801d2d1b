"""Errors in the form of OpenAI's API: a status, and `{"error": {message, type, param, code}}`."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, final

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from treespec.engine.options import REQUEST_OPTION_NAMES
from treespec.errors import InputError, TooLong
from treespec.files.printable import to_one_line

log = logging.getLogger(__name__)

NO_OBJECT = "the body must be a JSON object (Content-Type: application/json)"

# An InputError's message may begin with an option's name: the request's field for each option.
FIELD_OF_OPTION = {name: name for name in REQUEST_OPTION_NAMES}
FIELD_OF_OPTION |= {"seed": "seed", "json_schema": "response_format", "pictures": "messages"}


@final
class ApiError(HTTPException):
    """An error response.

    Args:
        status: the HTTP status.
        message: what is wrong, for the client.
        param: the request's field at fault. Default: None.
        code: one of OpenAI's error codes, if one fits. Default: None.
        headers: further HTTP headers. Default: None.
    """

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
        """The JSON body of the response."""
        kind = "invalid_request_error"
        if self.status_code == 429:
            kind = "rate_limit_error"
        elif self.status_code >= 500:
            kind = "server_error"
        message = to_one_line(str(self.detail))
        fields = {"message": message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}


def build_bad_request(error: BaseException, param: str | None = None) -> ApiError:
    """Build the 400 for an input that treespec refuses.

    param: the request's field at fault; an option's name at the start of the message overrides it.
    """
    code = None
    if isinstance(error, TooLong):
        code = "context_length_exceeded"
    return ApiError(400, str(error), _find_field(error) or param, code)


def _find_field(error: BaseException) -> str | None:
    """The request's field for the option that an error's message begins with; None for any other message."""
    return FIELD_OF_OPTION.get(str(error).partition(" ")[0].rstrip(":,"))


def to_api_error(error: Exception) -> ApiError:
    """Convert any exception to the error that the client receives, before or during an answer.

    The message of an InputError is sent; any other is only logged. Clients retry after a 500, so an error that the
    request causes is a 400.
    """
    if isinstance(error, ApiError):
        return error
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
    """Respond to any exception of the application with OpenAI's error body."""
    return build_error_response(to_api_error(error))


def build_error_response(error: ApiError) -> JSONResponse:
    """Build the HTTP response of an error."""
    return JSONResponse(error.body, error.status_code, error.headers)


def build_invalid_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Build the 400 for a body that pydantic refuses, from the first of its errors."""
    first = errors[0]
    param = name_of(first["loc"])
    if first["type"] == "unknown_field":
        name = first["ctx"]["name"]
        hint = first["ctx"]["hint"]
        return ApiError(400, f"Unknown parameter: '{name}'{hint}", name, "unknown_parameter")
    if param is None:
        return ApiError(400, NO_OBJECT)
    if first["type"] == "missing":
        return ApiError(400, f"Missing required parameter: '{param}'", param, "missing_parameter")
    problem = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"Invalid '{param}': {problem}", param, "invalid_value")


def name_of(location: Sequence[str | int]) -> str | None:
    """Format pydantic's location of an error as `messages[1].content`; None for the body as a whole."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "constrained"):
            name += f".{part}"
    if not name:
        return None
    return name.removeprefix(".")
