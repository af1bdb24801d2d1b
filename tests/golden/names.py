"""What people type and read: options, names, fields of requests and replies, keys, and names of Python.

Each function takes what is known of a list and gives what there is today. It tries what is known, where the code does
not list it. Without what is known it gives the names to begin the list with.
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
from importlib import import_module
from io import StringIO
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import typer
from commands import treespec

from golden.http_names import list_metrics, list_reply_fields, list_request_fields
from treespec import load
from treespec.cli import app
from treespec.errors import InputError
from treespec.trees.policy import parse_policy

ROOT = Path(__file__).resolve().parents[2]
PYTHON = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
END = "no-such-key"
Known = Any  # what is known of a list: names, or names with what belongs to each


def list_click_commands() -> dict[str, Any]:
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


def list_commands(known: Known) -> Known:
    """Every option of every command: its flags, and its default as it is typed."""
    return {
        name: {
            flag: str(option.default) for option in command.params for flag in (*option.opts, *option.secondary_opts)
        }
        for name, command in list_click_commands().items()
    }


def get_refusal(line: str) -> str:
    """What `treespec LINE` says on standard error."""
    error = StringIO()
    with redirect_stderr(error):
        treespec(line)
    return " ".join(error.getvalue().split())


def list_choices(known: Known) -> Known:
    """The values of options that take a few names, as the error about another one lists them."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, command in list_click_commands().items():
        needed = [one.opts[0] for one in command.params if one.required or one.opts[0] == "--target"]  # none is there
        for option in command.params:
            flag = option.opts[0]
            others = " ".join(f"{other} none" for other in needed if other != flag)
            listed = re.search(rf"{flag} is '\?', must be (.*)$", get_refusal(f"{name} {others} {flag} ?"))
            values = re.split(r", | or ", listed[1]) if listed else []
            if values and all(re.fullmatch(r"[\w.+-]+|gguf:FILE", value) for value in values):
                found.setdefault(name, {})[flag] = values
    return found


def list_yaml_keys(known: Known) -> Known:
    """The keys that the file behind `--config` may have, for each command: those of its options."""
    found = {}
    for name, command in list_click_commands().items():
        flags = (flag for option in command.params for flag in option.opts)
        found[name] = [flag[2:] for flag in flags if flag not in ("--config", "--help", "-h")]
    for name, keys in (known or {}).items():
        unknown = find_unknown_keys(name, keys)
        found[name] = [key for key in keys if key not in unknown]
    return found


def find_unknown_keys(command: str, keys: Iterable[str]) -> set[str]:
    """The keys that a command does not take from a file. An error names the first; the last is none in any case."""
    unknown = set[str]()
    while END not in unknown:
        Path("keys.yaml").write_text("".join(f"{key}:\n" for key in (*keys, END) if key not in unknown))
        wrong = re.search(r"keys\.yaml: no option (\S+?)(:|$)", get_refusal(f"{command} --config keys.yaml"))
        if wrong is None:  # there is no such command
            return set(keys)
        unknown.add(wrong[1])
    return unknown


VERIFIERS = {  # with their options, and a tree for each
    "auto": "2x2",
    "gumbel": "2x2",
    "single": "chain:2",
    "rrs": "2x2",
    "rrs-wo": "2x2",
    "kseq": "2x2",
    "spechub": "2x2",
    "greedy": "2x2",
    "is-lp:s=2": "2x2",
    "optimal:threshold=0.5,extra=1,exact=0": "2x2",
    "topk": "2x2",
    "typical:epsilon=0.1,delta=0.3": "2x2",
    "block": "chain:2",
    "traversal": "2x2",
    "block-optimal:threshold=0,extra=0": "2x2",
}


def list_verifiers(known: Known) -> Known:
    """Verifiers, which decode."""
    if known is None:
        return VERIFIERS
    spec, found = load("target", "heads/eagle", dtype="float32"), {}
    for name, tree in known.items():
        with suppress(InputError):
            spec.configured(tree, name, allow_lossy=True).generate([5, 6, 7], max_new_tokens=3, temperature=1.0, seed=0)
            found[name] = tree
    return found


TREES = [
    *("auto", "auto:nodes=64,depth=12,topk=10", "eagle", "medusa", "chain:5", "2x4", "balanced:2x4", "levels:3x2x1"),
    *("dynamic", "dynamic:depth=6,topk=10,nodes=60", "ddtree", "ddtree:nodes=60,depth=16", "tree.json"),
]


def list_trees(known: Known) -> Known:
    """Trees as `--tree` takes them."""
    return [name for name in known if is_tree(name)] if known else TREES


def is_tree(name: str) -> bool:
    with suppress(InputError):
        return bool(parse_policy(name))
    return False


DRAFTERS = [
    *("head:heads/eagle", "eagle:heads/eagle@chain:3", "eagle3:heads/eagle3", "medusa:heads/medusa"),
    *("hydra:heads/hydra", "hydra++:heads/hydra++", "dflash:heads/dflash", "p-eagle:heads/p-eagle", "model:target"),
    *("suffix", "suffix:tokens=5000,longest=32,nodes=24,growth=1,percent=20", "suffix:5000"),
    "suffix:memory,nodes=8+medusa:heads/medusa@chain:2",
]


def list_drafters(known: Known) -> Known:
    """Drafters as `--drafter` takes them, which draft for the golden target."""
    if known is None:
        return DRAFTERS
    found = []
    for name in known:
        with suppress(InputError):
            if load("target", drafter=name, dtype="float32").source:
                found.append(name)
    return found


PUBLIC = ("treespec:load", "treespec:Spec", "treespec:Engine", "treespec.api.hf:Trees")
SEAMS = {  # what parts of one's own are made of, with the parameters that the tutorial gives
    "treespec:InputError": (),
    "treespec.trees.static:StaticTree": ("paths",),
    "treespec.trees.tree:Draws": ("tokens",),
    "treespec.draft.model_free.guess:Guess.chain": ("tokens",),
    "treespec.draft.model_free.one_hot:TextDrafter": (),
    "treespec.draft.options:DrafterKind": ("name", "forms", "loads", "summary", "options", "one_hot"),
    "treespec.draft.options:DrafterOptions": (),
    "treespec.options:option": ("help", "default"),
    "treespec.verify.conformance:check": ("verifier", "widths", "draws"),
    "treespec.verify.scheme:Scheme": (),
    "treespec.verify.walk:Walk": ("scheme",),
}
INSIDE = (  # attributes that are of the loop, not for callers
    *("decoder", "times", "requests", "request", "proposer"),
    *("take", "end", "stretch", "now", "add", "count_drafted"),
)
# What a program holds after `load`: an expression of `spec`, `engine`, `answer`, `stream` and `cycle`.
HELD = (
    *("spec", "engine", "answer", "answer.stats", "answer.logprobs[0]"),
    *("stream", "piece", "cycle", "cycle.own", "job"),
)


def list_parameters(function: Any) -> list[str]:
    """The names of a function's parameters, but self."""
    with suppress(ValueError, TypeError):
        return [name for name in inspect.signature(function).parameters if name not in ("self", "args", "kwargs")]
    return []


def list_attributes(value: Any) -> dict[str, Any]:
    """The public attributes of an object; of a method its parameters."""
    found: dict[str, Any] = {}
    for name in dir(value):
        if not name.startswith("_") and name not in INSIDE:
            part = getattr(value, name)
            found[name] = list_parameters(part) if inspect.ismethod(part) else None
    return found


def list_python(known: Known) -> Known:
    """What pages and programs import, with its parameters, and the attributes of what calls give."""
    found: dict[str, Any] = {}
    for name in (*PUBLIC, *SEAMS):
        with suppress(ImportError, AttributeError):
            own = list_parameters(resolve_name(name))
            found[name] = [one for one in own if one in SEAMS.get(name, own)]
    spec, cycles = load("target", "heads/eagle", "2x2", "topk", dtype="float32"), list[Any]()
    options: dict[str, Any] = {"max_new_tokens": 4, "logprobs": True, "top_logprobs": 1}
    answer, stream = spec.generate([5, 6], on_cycle=cycles.append, **options), spec.stream([5, 6], **options)
    with resolve_name("treespec:Engine")(spec, batch=2, queue=2) as engine:
        job = engine.submit([5, 6], **options)
        job.result()
        held = {"spec": spec, "engine": engine, "answer": answer, "stream": stream, "job": job}
        held |= {"piece": next(stream), "cycle": cycles[0]}
        for text in HELD:
            found[text] = list_attributes(eval(text, held))
    found["spec.generate"] = [*list_keywords(spec)]
    return found


def list_keywords(spec: Any) -> Iterable[str]:
    """The keywords of `generate`, as the error about an unknown one lists them."""
    try:
        spec.generate([5], unknown_word=1)
    except InputError as error:
        return re.findall(r"\w+", str(error).partition("there are ")[2])
    return ()


def parse_programs() -> Iterable[ast.Module]:
    """The Python of pages, but sketches that do not parse, and of their examples."""
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    blocks = [block for page in pages for block in PYTHON.findall(page)]
    examples = [file.read_text(encoding="utf-8") for file in (ROOT / "docs" / "examples").glob("*.py")]
    for text in (*blocks, *examples):
        with suppress(SyntaxError):
            yield ast.parse(text)


def list_imports(known: Known) -> Known:
    """What pages and examples import of treespec, as module:name."""
    if known is None:
        nodes = (node for program in parse_programs() for node in ast.walk(program) if isinstance(node, ast.ImportFrom))
        own = (node for node in nodes if (node.module or "").partition(".")[0] == "treespec")
        return sorted({f"{node.module}:{alias.name}" for node in own for alias in node.names})
    return [name for name in known if is_imported(*name.split(":"))]


def is_imported(module: str, name: str) -> bool:
    with suppress(ImportError):
        return hasattr(import_module(module), name)
    return False


ASKING = """
import importlib.metadata as metadata, json
asked, real = [], metadata.entry_points
def recorded(**chosen):
    asked.append(chosen.get("group"))
    return real(**chosen)
metadata.entry_points = recorded
from treespec.cli import app, run
run(app, ["generate", "--target", ".", "--head", "none", "--tree", "none"])
from treespec.trees.policy import parse_policy
try:
    parse_policy("none")
except Exception:
    pass
print(json.dumps(sorted({name for name in asked if name and name.startswith("treespec")})))
"""


def list_entry_points(known: Known) -> Known:
    """The groups of entry points that treespec reads, and the commands that it installs."""
    done = subprocess.run([sys.executable, "-c", ASKING], capture_output=True, text=True, cwd=ROOT)
    groups = json.loads(done.stdout.splitlines()[-1])
    own = importlib.metadata.distribution("treespec-llm").entry_points
    return [*groups, *(f"{point.group}: {point.name}" for point in own)]


def list_chat_commands(known: Known) -> Known:
    """What a conversation takes beside messages, such as /save."""
    from treespec.cli.chat import CHAT_COMMANDS

    return sorted(CHAT_COMMANDS)


LISTS: dict[str, Callable[[Known], Known]] = {
    "commands": list_commands,
    "choices": list_choices,
    "yaml keys": list_yaml_keys,
    "chat commands": list_chat_commands,
    "verifiers": list_verifiers,
    "trees": list_trees,
    "drafters": list_drafters,
    "request fields": list_request_fields,
    "reply fields": list_reply_fields,
    "metrics": list_metrics,
    "python": list_python,
    "imports": list_imports,
    "entry points": list_entry_points,
}


def find_lost(known: Known, found: Known, place: str = "") -> Iterable[str]:
    """What is known, and not found. A default, or an option's parameters, may not change; more names are fine."""
    if isinstance(known, dict):
        for name, value in known.items():
            if name not in found:
                yield f"{place}{name}"
            else:
                yield from find_lost(value, found[name], f"{place}{name} ")
    elif isinstance(known, list):
        yield from (f"{place}{name}" for name in known if name not in (found or ()))
    elif known is not None and known != found:
        yield f"{place}{known} (now {found})"
