"""The server's log on standard error: a line for each request, with its id, as text or as JSON."""

import json
import logging
import re
import secrets
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from starlette.types import Scope

from treespec.files.printable import to_one_line

REQUEST_ID_HEADER = b"x-request-id"
REQUEST_ID_PATTERN = re.compile(rb"[!-~]{1,128}")
ACCESS_LOGGER = "treespec.access"

request_id: ContextVar[str] = ContextVar("request_id", default="")
log = logging.getLogger(ACCESS_LOGGER)


def read_request_id(scope: Scope) -> str:
    """The id that the client or a proxy gave the request in `x-request-id`, or a new one."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER and REQUEST_ID_PATTERN.fullmatch(value):
            return str(value.decode())
    return f"req-{secrets.token_hex(12)}"


def log_request(scope: Scope, status: int, began: float) -> None:
    """Log a request at its end. status: 499 if the client left first. began: by `time.perf_counter`."""
    client = "unknown"
    if scope["client"]:
        client = scope["client"][0]
    fields = {
        "client": client,
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(time.perf_counter() - began, 3),
    }
    message = "{client} {method} {path} {status} {seconds} s".format(**fields)
    log.info("%s", to_one_line(message), extra={"fields": fields})


class TextFormatter(logging.Formatter):
    """Writes `2026-11-30T12:00:00.123Z info 127.0.0.1 GET /health 200 0.001 s [id]`."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{format_time(record)} {record.levelname.lower()} {self.format_message(record)}"
        if request_id.get():
            line += f" [{request_id.get()}]"
        return line

    def format_message(self, record: logging.LogRecord) -> str:
        """The message, with the traceback of an error."""
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        return message


class JsonFormatter(TextFormatter):
    """Writes each record as a JSON object in a line."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {"time": format_time(record), "level": record.levelname.lower()}
        if request_id.get():
            fields["request_id"] = request_id.get()
        more = getattr(record, "fields", None)
        if more is None:
            more = {"message": self.format_message(record)}
        return json.dumps(fields | more, ensure_ascii=False)


def format_time(record: logging.LogRecord) -> str:
    """The time of a record in UTC, to the millisecond."""
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def build_log_config(access: bool, as_json: bool) -> dict[str, Any]:
    """Build the configuration of the loggers of uvicorn and of the server, for `logging.config.dictConfig`.

    access: whether requests are logged, too; otherwise only errors. as_json: whether lines are JSON.
    """
    formatter = TextFormatter
    if as_json:
        formatter = JsonFormatter
    level = "ERROR"
    if access:
        level = "INFO"
    logger = {"handlers": ["stderr"], "level": level, "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": formatter}},
        "handlers": {
            "stderr": {
                "class": "logging.StreamHandler",
                "formatter": "line",
                "stream": "ext://sys.stderr",
            }
        },
        "loggers": dict.fromkeys(("uvicorn", "treespec.serve", ACCESS_LOGGER), logger),
    }
