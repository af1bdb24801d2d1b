"""A client of servers with OpenAI's interface: vLLM, SGLang, llama.cpp, treespec."""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from treespec.files.printable import to_one_line

API_KEY_VARIABLE = "OPENAI_API_KEY"  # the environment variable of a server's key
ENDPOINT_TIMEOUT_SECONDS = 600.0  # that a server may be silent
ENDPOINT_ERRORS = (
    OSError,
    http.client.HTTPException,
    ValueError,
)  # what `stream_chat_completion` and `find_served_model` raise


@dataclass
class EndpointReply:
    """A chat completion as its client sees it.

    thought: what the server tells apart as `reasoning_content` or `reasoning`.
    token_ids, prompt_ids: of the answer with its thoughts and end, and of the prompt, where the server tells
    all of them.
    times: seconds to each piece of text. cut: whether `max_tokens` ended it. usage: the tokens that
    the server counts, `prompt_tokens` and `completion_tokens`; empty where it reports none.
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
        """Add what a chunk of the stream brings. Returns whether it has text without its token ids.

        Raises LookupError, TypeError or AttributeError for what is no chunk.
        """
        has_untold_text = False
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
                has_untold_text = True
        return has_untold_text


class EndpointDelta(NamedTuple):
    """What is new in a choice of a stream. ids: of its tokens, [] where the server does not tell them."""

    text: str
    thought: str
    ids: list[int]


def read_delta(choice: Mapping[str, Any]) -> EndpointDelta:
    """What a choice of a chunk brings. Raises LookupError, TypeError or AttributeError for what is no choice.

    Thoughts stand in `reasoning_content`, in newer vLLM in `reasoning`. Token ids stand in vLLM's field, in
    llama.cpp's log-probabilities.
    """
    delta = choice["delta"]
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    ids = choice.get("token_ids")
    if not ids:
        told = (choice.get("logprobs") or {}).get("content") or []
        ids = [one["id"] for one in told if "id" in one]
    return EndpointDelta(delta.get("content") or "", thought, ids)


def open_request(url: str, body: Mapping[str, object] | None = None) -> Any:
    """The reply to a request, which may still be arriving. Raises OSError."""
    headers = {"Content-Type": "application/json"}
    key = os.environ.get(API_KEY_VARIABLE)
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None
    if body is not None:
        data = json.dumps(body).encode()
    return urllib.request.urlopen(
        urllib.request.Request(url, data, headers), timeout=ENDPOINT_TIMEOUT_SECONDS
    )


def find_served_model(address: str) -> str:
    """The name of the first model at an address, such as http://localhost:8000/v1.

    Raises as `stream_chat_completion` does.
    """
    with open_request(f"{address}/models") as reply:
        try:
            return json.loads(reply.read())["data"][0]["id"]
        except (LookupError, TypeError) as error:
            raise ValueError(f"it names no model: {error}") from error


def stream_chat_completion(address: str, body: Mapping[str, object]) -> EndpointReply:
    """A streamed chat completion. body: model, messages and options, as OpenAI's interface has them.

    Raises OSError or HTTPException where it is refused or breaks off, ValueError for anything else.
    """
    reply = EndpointReply()
    ended = False
    untold = False
    started = time.perf_counter()
    more = {"stream": True, "stream_options": {"include_usage": True}}
    with open_request(f"{address}/chat/completions", {**body, **more}) as lines:
        for line in lines:
            event = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or event == b"[DONE]":
                continue
            try:
                chunk = json.loads(event)
                untold |= reply.take(chunk, time.perf_counter() - started)
                ended |= any(choice.get("finish_reason") for choice in chunk["choices"])
            except (LookupError, TypeError, AttributeError) as error:
                raise ValueError(to_one_line(event.decode(errors="replace"))[:200]) from error
    if not ended:
        raise ConnectionError("its answer breaks off")
    reply.seconds = time.perf_counter() - started
    if untold:
        reply.token_ids.clear()  # llama.cpp tells none of accepted drafts
    reply.text = _replace_half_characters(reply.text)
    reply.thought = _replace_half_characters(reply.thought)
    return reply


def _replace_half_characters(text: str) -> str:
    """The text without halves of surrogate pairs."""
    return text.encode(errors="replace").decode()


def describe_error(error: Exception) -> str:
    """What a server, or the connection to it, had to say."""
    if isinstance(error, urllib.error.HTTPError):
        hint = ""
        if error.code in (401, 403):
            hint = f"; its key is taken from {API_KEY_VARIABLE}"
        told = to_one_line(error.read(2000).decode(errors="replace"))[:200]
        return f"the server refuses with HTTP {error.code}: {told}{hint}"
    if isinstance(error, ValueError):
        return f"the server answers with no chat completion: {error}"
    return (
        f"the server does not answer: {to_one_line(str(getattr(error, 'reason', None) or error))}"
    )
