"""A client of servers with OpenAI's interface: vLLM, SGLang, llama.cpp, treespec."""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from treespec.text.strings import one_line

KEY = "OPENAI_API_KEY"  # the environment variable of a server's key
SECONDS = 600.0  # that a server may be silent
FAILURES = (OSError, http.client.HTTPException, ValueError)  # what `completed` and `served` raise


@dataclass
class Reply:
    """A chat completion as its client sees it.

    token_ids: where the server tells all of them.
    times: seconds to each piece of text. cut: whether `max_tokens` ended it. usage: the tokens that
    the server counts, `prompt_tokens` and `completion_tokens`; empty where it reports none.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    cut: bool = False
    usage: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def opened(url: str, body: Mapping[str, object] | None = None) -> Any:
    """The reply to a request, which may still be arriving. Raises OSError."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=SECONDS)


def served(address: str) -> str:
    """The name of the first model at an address, such as http://localhost:8000/v1.

    Raises as `completed` does.
    """
    with opened(f"{address}/models") as reply:
        try:
            return json.loads(reply.read())["data"][0]["id"]
        except (LookupError, TypeError) as error:
            raise ValueError(f"it names no model: {error}") from error


def completed(address: str, body: Mapping[str, object]) -> Reply:
    """A streamed chat completion. body: model, messages and options, as OpenAI's interface has them.

    Raises OSError or HTTPException where it is refused or breaks off, ValueError for anything else.
    """
    reply, ended, untold, started = Reply(), False, False, time.perf_counter()
    more = {"stream": True, "stream_options": {"include_usage": True}}
    with opened(f"{address}/chat/completions", {**body, **more}) as lines:
        for line in lines:
            event = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or event == b"[DONE]":
                continue
            try:
                chunk = json.loads(event)
                reply.usage = chunk.get("usage") or reply.usage
                for choice in chunk["choices"]:
                    if piece := choice["delta"].get("content"):
                        reply.times.append(time.perf_counter() - started)
                        reply.text += piece
                    told = (choice.get("logprobs") or {}).get("content") or []
                    known = choice.get("token_ids") or [one["id"] for one in told if "id" in one]
                    reply.token_ids += known
                    untold |= bool(piece and not known)
                    ended |= bool(choice.get("finish_reason"))
                    reply.cut |= choice.get("finish_reason") == "length"
            except (LookupError, TypeError, AttributeError) as error:
                raise ValueError(one_line(event.decode(errors="replace"))[:200]) from error
    if not ended:
        raise ConnectionError("its answer breaks off")
    reply.seconds = time.perf_counter() - started
    if untold:
        reply.token_ids.clear()  # llama.cpp tells none of accepted drafts
    reply.text = reply.text.encode(errors="replace").decode()  # half of a surrogate pair
    return reply


def said_by(error: Exception) -> str:
    """What a server, or the connection to it, had to say."""
    if isinstance(error, urllib.error.HTTPError):
        hint = f"; its key is taken from {KEY}" if error.code in (401, 403) else ""
        told = one_line(error.read(2000).decode(errors="replace"))[:200]
        return f"the server refuses with HTTP {error.code}: {told}{hint}"
    if isinstance(error, ValueError):
        return f"the server answers with no chat completion: {error}"
    return f"the server does not answer: {one_line(str(getattr(error, 'reason', None) or error))}"
