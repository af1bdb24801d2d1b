"""What people type and read: options, names, fields of requests and replies, keys, and names of Python.

Each function takes what is known of a list, None at first, and gives what of it there is today, and more.
"""

import ast
import importlib.metadata
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, suppress
from dataclasses import fields, is_dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import httpx
import typer
from commands import treespec
from http_serving import client, serving, tiny_spec

from treespec import load
from treespec.cli import app
from treespec.errors import InputError
from treespec.trees.policy import POLICIES, policy
from treespec.verify.facts import NAMES as VERIFIERS
from treespec.verify.facts import SCHEMES

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
PYTHON = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
Known = Any  # what is known of a list: names, or names with what belongs to each


def every_command() -> dict[str, Any]:
    """click's commands by name; those of a group bear its name."""
    found: dict[str, Any] = {}

    def visit(group: Any, before: str) -> None:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                visit(command, f"{before}{name} ")
            else:
                found[before + name] = command

    visit(typer.main.get_command(app), "")
    return found


def commands(known: Known) -> Known:
    """Every option of every command: its flags, and its default as it is typed."""
    return {
        name: {
            flag: str(option.default)
            for option in command.params
            for flag in (*option.opts, *option.secondary_opts)
        }
        for name, command in every_command().items()
    }


def refusal(line: str) -> str:
    """What `treespec LINE` says on standard error."""
    error = StringIO()
    with redirect_stderr(error):
        treespec(line)
    return " ".join(error.getvalue().split())


def choices(known: Known) -> Known:
    """The values of options that take a few names, as the error about another one lists them."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, command in every_command().items():
        needed = [option.opts[0] for option in command.params if option.required]
        for option in command.params:
            flag = option.opts[0]
            if option.type.name != "text":
                continue
            others = " ".join(f"{other} none" for other in needed if other != flag)
            listed = re.search(rf"{flag} is '\?', must be (.*)$", refusal(f"{name} {others} {flag} ?"))
            values = re.split(r", | or ", listed[1]) if listed else []
            if values and all(re.fullmatch(r"[\w.+-]+|gguf:FILE", value) for value in values):
                found.setdefault(name, {})[flag] = values
    return found


def yaml_keys(known: Known) -> Known:
    """The keys that the file behind `--config` may have, for each command: those of its options."""
    found = {}
    for name, command in every_command().items():
        flags = (flag for option in command.params for flag in option.opts)
        found[name] = [flag[2:] for flag in flags if flag not in ("--config", "--help", "-h")]
    for name, keys in (known or {}).items():
        unknown = set[str]()
        while True:  # an error names one key
            Path("keys.yaml").write_text("".join(f"{key}:\n" for key in keys if key not in unknown))
            wrong = re.search(r"keys\.yaml: '(.*?)' is no option", refusal(f"{name} --config keys.yaml"))
            if not wrong:
                break
            unknown.add(wrong[1])
        found[name] = [key for key in keys if key not in unknown]
    return found


def verifiers(known: Known) -> Known:
    """Verifiers with their options, and a tree for each, which decode."""
    wanted = known or {
        f"{name}{':' * bool(options)}{','.join(f'{option}=1' for option in options)}": (
            "2x2" if SCHEMES.get(name, SCHEMES["rrs"]).max_draws != 1 and name != "block" else "chain:2"
        )
        for name in VERIFIERS
        for options in [SCHEMES[name].options if name in SCHEMES else {}]
    }
    spec, found = load("target", "heads/eagle", dtype="float32"), {}
    for name, tree in wanted.items():
        with suppress(InputError):
            spec.configured(tree, name, allow_lossy=True).generate([5, 6, 7], max_new_tokens=3, temperature=1.0, seed=0)
            found[name] = tree
    return found


def trees(known: Known) -> Known:
    """Trees as `--tree` takes them: an example of each form, and one with all of its options."""
    found: list[str] = []
    for name, form in POLICIES.items():
        tree = policy(form.example)
        found.append(form.example)
        if is_dataclass(tree) and not hasattr(tree, "paths"):
            found += [f"{name}:{option.name}={getattr(tree, option.name)}" for option in fields(tree)]
    spec, good = load("target", "heads/eagle", dtype="float32"), []
    for text in known or found:
        with suppress(InputError):
            spec.configured(text, "topk")
            good.append(text)
    return good


DRAFTERS = [
    *("head:heads/eagle", "eagle:heads/eagle", "eagle3:heads/eagle3", "medusa:heads/medusa", "hydra:heads/hydra"),
    *("hydra++:heads/hydra++", "dflash:heads/dflash", "p-eagle:heads/p-eagle", "model:target", "suffix"),
    *("suffix:memory", "suffix:tokens=5000,longest=32,nodes=24,growth=1,percent=20", "suffix:5000"),
    *("suffix+eagle:heads/eagle", "eagle:heads/eagle@chain:3", "suffix:memory,nodes=8+medusa:heads/medusa@medusa"),
]


def drafters(known: Known) -> Known:
    """Drafters as `--drafter` takes them, which draft for the golden target."""
    found = []
    for name in known or DRAFTERS:
        with suppress(InputError):
            if load("target", drafter=name, dtype="float32").source:
                found.append(name)
    return found


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
            "messages": [{"role": "system", "content": [{"type": "text", "text": "a"}]}, {"role": "developer"}, *USER]
            + [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "1", "tool_call_id": "call_1"}],
            "max_completion_tokens": 3,
            "logprobs": True,
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
    "/cycles": (
        {"messages": USER, "max_tokens": 2},
        {"drafts": False, "verifier": "topk", "tree": "2x4", "temperature": 0.5, "max_tokens": 3, "seed": 1},
    ),
}


def request_fields(known: Known) -> Known:
    """The fields that a request may have, by path: each is sent, and answered."""
    found: dict[str, list[str]] = {}
    with serving(tiny_spec(context=512)) as state, client(state) as http:
        for path, (body, values) in REQUESTS.items():
            for name, value in values.items():
                if http.post(path, json=body | {name: value}).status_code == 200:
                    found.setdefault(path, []).append(name)
        both = {"logprobs": True, "top_logprobs": 2}
        if http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 2} | both).status_code == 200:
            found["/v1/chat/completions"].append("top_logprobs")
        if http.post("/tokenize", json={"messages": USER}).status_code == 200:
            found["/tokenize"].append("messages")
    return found


def keys_of(value: object, place: str = "") -> set[str]:
    """The places of a JSON value's keys, such as choices[].message.content."""
    if isinstance(value, dict):
        inner = (keys_of(part, f"{place}.{name}" if place else name) for name, part in value.items())
        return set().union(*inner)
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return set().union(*(keys_of(part, f"{place}[]") for part in value))
    return {place}


def events_of(reply: httpx.Response) -> list[Any]:
    """The objects of server-sent events; what ends them is no object."""
    lines = (line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


def reply_fields(known: Known) -> Known:
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
    with serving(tiny_spec(context=512)) as state, client(state) as http:
        for name, body in asked.items():
            method, path, *_ = name.split()
            reply = http.request(method, path, json=body)
            told = events_of(reply) if "event-stream" in reply.headers["content-type"] else [reply.json()]
            names = set().union(*map(keys_of, told))
            found[name] = sorted(re.sub(r"(top_logprobs\[\]\.).*", r"\1*", name) for name in names)
    return found


def metrics(known: Known) -> Known:
    """The names of /metrics, with their labels."""
    with serving(tiny_spec(context=512)) as state, client(state) as http:
        http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 2})
        told = http.get("/metrics").text
    found: dict[str, list[str]] = {}
    for name, labels in re.findall(r"^(\w+)(?:\{(.*?)\})? ", told, re.MULTILINE):
        found[name] = sorted(set(re.findall(r"(\w+)=", labels)))
    return found


PUBLIC = (
    *("treespec:load", "treespec:Spec", "treespec:Engine", "treespec:InputError", "treespec.api.hf:Trees"),
    *("treespec.trees.static:StaticTree", "treespec.trees.tree:Draws", "treespec.draft.model_free.guess:Guess"),
    *("treespec.draft.model_free.one_hot:TextDrafter", "treespec.draft.options:DrafterKind"),
    *("treespec.draft.options:DrafterOptions", "treespec.options:option", "treespec.verify.conformance:check"),
    *("treespec.verify.scheme:Scheme", "treespec.verify.walk:Walk"),
)
INSIDE = {"decoder", "times", "requests", "request", "proposer", "take", "end"}  # of the loop, not for callers
# What a program holds after `load`: an expression of `spec`, `engine`, `answer`, `stream` and `cycle`.
HELD = ("spec", "engine", "answer", "answer.stats", "answer.logprobs[0]", "stream", "piece", "cycle", "cycle.own", "job")


def parameters_of(function: Any) -> list[str]:
    """The names of a function's parameters, but self."""
    with suppress(ValueError, TypeError):
        return [name for name in inspect.signature(function).parameters if name not in ("self", "args", "kwargs")]
    return []


def attributes_of(value: Any) -> dict[str, Any]:
    """The public attributes of an object; of a method its parameters."""
    found: dict[str, Any] = {}
    for name in dir(value):
        if not name.startswith("_") and name not in INSIDE:
            part = getattr(value, name)
            found[name] = parameters_of(part) if inspect.ismethod(part) else None
    return found


def python(known: Known) -> Known:
    """What pages and programs import, with its parameters, and the attributes of what calls give."""
    found: dict[str, Any] = {}
    for name in PUBLIC:
        with suppress(ImportError, AttributeError):
            found[name] = parameters_of(resolve_name(name))
    spec, cycles = load("target", "heads/eagle", "2x2", "topk", dtype="float32"), list[Any]()
    options: dict[str, Any] = {"max_new_tokens": 4, "logprobs": True, "top_logprobs": 1}
    answer, stream = spec.generate([5, 6], on_cycle=cycles.append, **options), spec.stream([5, 6], **options)
    with resolve_name("treespec:Engine")(spec, batch=2, queue=2) as engine:
        job = engine.submit([5, 6], **options)
        job.result()
        held = {"spec": spec, "engine": engine, "answer": answer, "stream": stream, "job": job}
        held |= {"piece": next(stream), "cycle": cycles[0]}
        for text in HELD:
            found[text] = attributes_of(eval(text, held))
    for keyword in RequestKeywords(spec):
        found["spec.generate"] = [*found.get("spec.generate", ()), keyword]
    return found


def RequestKeywords(spec: Any) -> Iterable[str]:
    """The keywords of `generate`, as the error about an unknown one lists them."""
    try:
        spec.generate([5], unknown_word=1)
    except InputError as error:
        return re.findall(r"\w+", str(error).partition("there are ")[2])
    return ()


def programs() -> Iterable[str]:
    """The Python of pages, and of their examples."""
    for page in PAGES:
        yield from PYTHON.findall(page.read_text(encoding="utf-8"))
    for file in (ROOT / "docs" / "examples").glob("*.py"):
        yield file.read_text(encoding="utf-8")


def imports(known: Known) -> Known:
    """What pages and examples import of treespec, as module:name."""
    found = set(known or ())
    for text in programs():
        for node in ast.walk(ast.parse(text)) if "while not done" not in text else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "treespec":
                found |= {f"{node.module}:{alias.name}" for alias in node.names}
    good = []
    for name in sorted(found):
        module, _, attribute = name.partition(":")
        with suppress(ImportError):
            if hasattr(import_module(module), attribute):
                good.append(name)
    return good


ASKING = """
import importlib.metadata as metadata, json
asked, real = [], metadata.entry_points
def recorded(**chosen):
    asked.append(chosen.get("group"))
    return real(**chosen)
metadata.entry_points = recorded
from treespec.cli import app, run
run(app, ["generate", "--target", ".", "--head", "none", "--tree", "none"])
from treespec.trees.policy import policy
try:
    policy("none")
except Exception:
    pass
print(json.dumps(sorted({name for name in asked if name and name.startswith("treespec")})))
"""


def entry_points(known: Known) -> Known:
    """The groups of entry points that treespec reads, and the commands that it installs."""
    done = subprocess.run([sys.executable, "-c", ASKING], capture_output=True, text=True, cwd=ROOT)
    groups = json.loads(done.stdout.splitlines()[-1])
    own = importlib.metadata.distribution("treespec").entry_points
    return [*groups, *(f"{point.group}: {point.name}" for point in own)]


def chat_commands(known: Known) -> Known:
    """What a conversation takes beside messages, such as /save."""
    from treespec.cli.chat import COMMANDS

    return sorted(COMMANDS)


LISTS: dict[str, Callable[[Known], Known]] = {
    "commands": commands,
    "choices": choices,
    "yaml keys": yaml_keys,
    "chat commands": chat_commands,
    "verifiers": verifiers,
    "trees": trees,
    "drafters": drafters,
    "request fields": request_fields,
    "reply fields": reply_fields,
    "metrics": metrics,
    "python": python,
    "imports": imports,
    "entry points": entry_points,
}


def lost(known: Known, found: Known, place: str = "") -> Iterable[str]:
    """What is known, and not found. A default, or an option's parameters, may not change; more names are fine."""
    if isinstance(known, dict):
        for name, value in known.items():
            if name not in found:
                yield f"{place}{name}"
            else:
                yield from lost(value, found[name], f"{place}{name} ")
    elif isinstance(known, list):
        yield from (f"{place}{name}" for name in known if name not in (found or ()))
    elif known is not None and known != found:
        yield f"{place}{known} (now {found})"
