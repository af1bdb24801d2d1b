"""The fields of a server's requests and replies, and its metrics: lists as in `golden.names`."""

import json
import re
from collections.abc import Iterable
from typing import Any

import httpx
from commands import client, serving, tiny_spec

Known = Any  # what is known of a list

USER = [{"role": "user", "content": "the user asks"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
SAMPLED = {
    "model": "tiny",
    "max_tokens": 3,
    "n": 2,
    "seed": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 4,
    "min_p": 0.1,
    "stop": ["x"],
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "ignore_eos": True,
    "regex": "a*",
    "grammar": 'start: "a"',
    "logit_bias": {"5": 1.0},
    "return_token_ids": True,
    "user": "me",
    "metadata": {},
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "a",
    "prediction": {},
    "prompt_cache_key": "a",
    "prompt_cache_retention": "24h",
    "modalities": ["text"],
    "verbosity": "medium",
    "best_of": 1,
    "suffix": "",
}
REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # by path: a body, and a value of each further field
    "/v1/chat/completions": (
        {"messages": USER, "max_tokens": 2},
        SAMPLED
        | {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "a"}]},
                {"role": "developer", "content": "a"},
                *USER,
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": "1", "tool_call_id": "call_1"},
            ],
            "max_completion_tokens": 3,
            "logprobs": True,
            "top_logprobs": 1,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {}}},
            "tools": [TOOL],
            "tool_choice": "auto",
            "chat_template_kwargs": {"a": 1},
            "parallel_tool_calls": False,
        },
    ),
    "/v1/completions": (
        {"prompt": "the user", "max_tokens": 2},
        SAMPLED | {"prompt": [[5, 6], [7]], "echo": True, "logprobs": 2},
    ),
    "/tokenize": ({"prompt": "the user"}, {"model": "tiny", "add_special_tokens": False}),
    "/tokenize of messages": ({}, {"messages": USER}),
    "/cycles": (
        {"messages": USER, "max_tokens": 2},
        {"drafts": False, "verifier": "topk", "tree": "2x4", "temperature": 0.5, "max_tokens": 3, "seed": 1},
    ),
}


APART = ("messages", "prompt", "regex", "grammar", "response_format", "tools", "tool_choice", "stop", "echo")


def list_request_fields(known: Known) -> Known:
    """The fields that a request may have, by path: each is sent, and answered."""
    if known is None:
        return {path: [*values] for path, (_, values) in REQUESTS.items()}
    found: dict[str, list[str]] = {}
    with serving(tiny_spec(context=512, eos=2)) as state, client(state) as http:
        for path, (body, values) in REQUESTS.items():

            def is_answered(names: Iterable[str], path: str = path, fields: dict[str, Any] = body | values) -> bool:
                return http.post(path.split()[0], json={name: fields[name] for name in names}).status_code == 200

            together = [name for name in values if name not in APART]
            answered = is_answered([*body, *together])
            found[path] = [name for name in values if (name in together and answered) or is_answered([*body, name])]
    return found


def list_keys(value: object, place: str = "") -> set[str]:
    """The places of a JSON value's keys, such as choices[].message.content."""
    if isinstance(value, dict):
        inner = (list_keys(part, f"{place}.{name}" if place else name) for name, part in value.items())
        return set().union(*inner)
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return set().union(*(list_keys(part, f"{place}[]") for part in value))
    return {place}


def read_events(reply: httpx.Response) -> list[Any]:
    """The objects of server-sent events; what ends them is no object."""
    lines = (line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


def list_reply_fields(known: Known) -> Known:
    """The fields of what a server sends, by path."""
    every = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True, "max_tokens": 3}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    text = {"prompt": "the user", "logprobs": 1, "return_token_ids": True, "max_tokens": 3}
    asked = {
        "GET /v1/models": None,
        "GET /v1/models/tiny": None,
        "GET /health": None,
        "GET /cycles": None,
        "POST /v1/chat/completions": {"messages": USER} | every,
        "POST /v1/chat/completions streamed": {"messages": USER} | every | streamed,
        "POST /v1/completions": text,
        "POST /v1/completions streamed": text | streamed,
        "POST /tokenize": {"prompt": "the user"},
        "POST /cycles": {"messages": USER, "max_tokens": 3},
        "POST /v1/chat/completions refused": {"messages": []},
    }
    found = {}
    with serving(tiny_spec(context=512, eos=2)) as state, client(state) as http:
        for name, body in asked.items():
            method, path, *_ = name.split()
            reply = http.request(method, path, json=body)
            told = read_events(reply) if "event-stream" in reply.headers["content-type"] else [reply.json()]
            names = set().union(*map(list_keys, told))
            found[name] = sorted({re.sub(r"(\.logprobs\.top_logprobs\[\]\.).*", r"\1*", name) for name in names})
    return found


def list_metrics(known: Known) -> Known:
    """The names of /metrics, with their labels."""
    with serving(tiny_spec(context=512, eos=2)) as state, client(state) as http:
        http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 2})
        told = http.get("/metrics").text
    found: dict[str, list[str]] = {}
    for name, labels in re.findall(r"^(\w+)(?:\{(.*?)\})? ", told, re.MULTILINE):
        if not name.endswith("_created"):
            found[name] = sorted(set(re.findall(r"(\w+)=", labels)))
    return found
