"""A client of servers with OpenAI's API: vLLM, SGLang, llama.cpp, treespec."""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from treespec.errors import InputError
from treespec.files.printable import to_one_line

API_KEY_VARIABLE = "OPENAI_API_KEY"  # environment variable that holds the server's API key
ENDPOINT_TIMEOUT_SECONDS = 600.0  # without a byte from the server
REQUEST_TRIES = 6
RETRY_PAUSE_SECONDS = 1.0  # pause before the first retry of a request, doubled each time
FIRST_ANSWER_SECONDS = 20.0  # for the first answer of a server, before anything is loaded
ENDPOINT_ERRORS = (
    OSError,
    http.client.HTTPException,
    ValueError,
)  # the errors that `stream_chat_completion` and `find_served_model` raise


@dataclass
class EndpointReply:
    """A chat completion as its client receives it.

    Attributes:
        text: the answer.
        token_ids: token ids of the answer, its thoughts and its end; [] unless the server reports all of them.
        times: seconds from the request to each piece of text.
        cut: whether `max_tokens` ended the answer.
        usage: the server's counts `prompt_tokens` and `completion_tokens`; {} if it reports none.
        seconds: seconds from the request to the end of the answer.
        thought: the thoughts that the server reports as `reasoning_content` or `reasoning`.
        prompt_ids: token ids of the prompt; [] unless the server reports them.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    cut: bool = False
    usage: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    thought: str = ""
    prompt_ids: list[int] = field(default_factory=list)

    def take(self, chunk: Mapping[str, Any], seconds: float) -> bool:
        """Add a chunk of the stream. Returns whether the chunk has text without token ids.

        Args:
            chunk: the parsed chunk.
            seconds: seconds since the request.

        Raises: LookupError, TypeError or AttributeError if the object is no chunk.
        """
        has_text_without_ids = False
        if chunk.get("usage"):
            self.usage = chunk["usage"]
        if chunk.get("prompt_token_ids"):
            self.prompt_ids = chunk["prompt_token_ids"]
        for choice in chunk["choices"]:
            text, thought, ids = read_delta(choice)
            if text:
                self.times.append(seconds)
            self.text += text
            self.thought += thought
            self.token_ids += ids
            if choice.get("prompt_token_ids"):
                self.prompt_ids = choice["prompt_token_ids"]
            if choice.get("finish_reason") == "length":
                self.cut = True
            if (text or thought) and not ids:
                has_text_without_ids = True
        return has_text_without_ids


class EndpointDelta(NamedTuple):
    """The new text of a choice. ids: ids of its tokens; [] if the server does not report them."""

    text: str
    thought: str
    ids: list[int]


def read_delta(choice: Mapping[str, Any]) -> EndpointDelta:
    """Read the new text of a choice in a chunk.

    Thoughts are in `reasoning_content`, in newer vLLM in `reasoning`. Token ids are in vLLM's field `token_ids`, or in
    llama.cpp's log-probabilities.

    Raises: LookupError, TypeError or AttributeError if the object is no choice.
    """
    delta = choice["delta"]
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    ids = choice.get("token_ids")
    if not ids:
        token_logprobs = (choice.get("logprobs") or {}).get("content") or []
        ids = [entry["id"] for entry in token_logprobs if "id" in entry]
    return EndpointDelta(delta.get("content") or "", thought, ids)


def check_address(option: str, value: str, model: bool = False) -> None:
    """Raises InputError, with what to write, for an address that is no URL.

    Args:
        option: the option that has it, for the message.
        value: URL, or URL,MODEL.
        model: whether a model's name stands behind the URL. Default: False.
    """
    if value.startswith(("http://", "https://")):
        return
    host, _, name = value.partition(",")
    url = f"http://{host}"
    if "/" not in host:
        url += "/v1"
    if model:
        url += f",{name or 'MODEL'}"
    raise InputError(f"{option} is {value!r}: write {url}")


def check_server(option: str, value: str) -> None:
    """Raises InputError if no server answers at an address. An HTTP error is an answer.

    option, value: as for `check_address`.
    """
    address = value.partition(",")[0].rstrip("/")
    try:
        open_request(f"{address}/models", timeout=FIRST_ANSWER_SECONDS).close()
    except urllib.error.HTTPError:
        return
    except ENDPOINT_ERRORS as error:
        raise InputError(f"{option} {address}: {describe_error(error)}") from error


def open_request(
    url: str,
    body: Mapping[str, object] | None = None,
    timeout: float = ENDPOINT_TIMEOUT_SECONDS,
) -> Any:
    """Send a request, and return the open response. Raises OSError.

    Args:
        url: the address.
        body: JSON fields to post. Default: None, which sends a GET.
        timeout: seconds without a byte from the server.
    """
    headers = {"Content-Type": "application/json"}
    key = os.environ.get(API_KEY_VARIABLE)
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None
    if body is not None:
        data = json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout)


def find_served_model(address: str, timeout: float = ENDPOINT_TIMEOUT_SECONDS) -> str:
    """Ask a server for the name of its first model.

    address: such as http://localhost:8000/v1. timeout: as for `open_request`.

    Raises as `stream_chat_completion` does.
    """
    with open_request(f"{address}/models", timeout=timeout) as reply:
        try:
            return json.loads(reply.read())["data"][0]["id"]
        except (LookupError, TypeError) as error:
            raise ValueError(f"it names no model: {error}") from error


def stream_chat_completion(address: str, body: Mapping[str, object]) -> EndpointReply:
    """Request a streamed chat completion, and receive all of it.

    Args:
        address: such as http://localhost:8000/v1.
        body: model, messages and options in OpenAI's fields.

    Raises:
        OSError, HTTPException: if the server refuses the request, or if the stream breaks off.
        ValueError: if the response is no chat completion.
    """
    reply = EndpointReply()
    ended = False
    has_text_without_ids = False
    started = time.perf_counter()
    stream_options = {"stream": True, "stream_options": {"include_usage": True}}
    with open_request(f"{address}/chat/completions", {**body, **stream_options}) as lines:
        for line in lines:
            event = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or event == b"[DONE]":
                continue
            try:
                chunk = json.loads(event)
                has_text_without_ids |= reply.take(chunk, time.perf_counter() - started)
                ended |= any(choice.get("finish_reason") for choice in chunk["choices"])
            except (LookupError, TypeError, AttributeError) as error:
                raise ValueError(to_one_line(event.decode(errors="replace"))[:200]) from error
    if not ended:
        raise ConnectionError("its answer breaks off")
    reply.seconds = time.perf_counter() - started
    if has_text_without_ids:
        reply.token_ids.clear()  # some are missing: llama.cpp reports none for accepted drafts
    reply.text = _replace_half_characters(reply.text)
    reply.thought = _replace_half_characters(reply.thought)
    return reply


def _replace_half_characters(text: str) -> str:
    """Replace halves of surrogate pairs by question marks."""
    return text.encode(errors="replace").decode()


def describe_error(error: Exception) -> str:
    """Describe an error of a server, or of the connection to it, in one line."""
    if isinstance(error, urllib.error.HTTPError):
        hint = ""
        if error.code in (401, 403):
            hint = f"; its key is taken from {API_KEY_VARIABLE}"
        response = to_one_line(error.read(2000).decode(errors="replace"))[:200]
        return f"the server refuses with HTTP {error.code}: {response}{hint}"
    if isinstance(error, ValueError):
        return f"the server answers with no chat completion: {error}"
    return (
        f"the server does not answer: {to_one_line(str(getattr(error, 'reason', None) or error))}"
    )
