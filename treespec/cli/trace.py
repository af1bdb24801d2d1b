"""`treespec trace`: an answer cycle by cycle, each drafted tree with what became of it."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from treespec.cli.config import AnswerConfig, load_spec
from treespec.cli.early import begin_answers
from treespec.cli.generate import GenerateConfig, prompt_of, read
from treespec.cli.options import takes
from treespec.errors import InputError
from treespec.options import MANY, option, shared

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    from treespec.requests.events import Cycle

ACCEPTED, OWN, REFUSED = "bold green", "bold yellow", "dim"


@dataclass(frozen=True, kw_only=True)
class TraceConfig(AnswerConfig):
    prompt: str | None = option("message to answer; - or no --prompt reads standard input", None)
    cycles: int | None = option(
        "stop after this number of cycles; default: the whole answer", None, least=1, most=MANY
    )
    json: bool = option("print a JSON object a cycle, for tools", False)
    raw: bool = shared(GenerateConfig, "raw")
    max_new_tokens: int = shared(AnswerConfig, "max_new_tokens", 64)


@takes(TraceConfig)
def trace(config: TraceConfig) -> None:
    """Answer a prompt and show every cycle: the drafted tree, what was accepted, and why no more.

    q: the draft model's probability of a token, p: the target's; at temperature 0, theirs at 1.
    """
    # 1. Refuse bad input before anything is loaded.
    text = read("-" if config.prompt is None else config.prompt)
    if config.source is None:
        raise InputError(
            "a trace shows drafted trees, and nothing drafts: give --head or --drafter"
        )
    begin_answers(config, chats=not config.raw)

    # 2. Answer, and show each cycle as it comes.
    spec = load_spec(config)
    from treespec.api.spec import trace as cycles_of
    from treespec.decoding.stats import TAU

    cycles = cycles_of(spec, prompt_of(text, config.raw), **config.requested)
    tokens = count = 0
    show = as_json if config.json else as_trees
    for cycle in show(islice(cycles, config.cycles)):
        tokens, count = tokens + cycle.new_tokens, count + 1
    print(f"{tokens} tokens · τ {tokens / max(count, 1):.2f} ({TAU})", file=sys.stderr)


def as_json(cycles: Iterator["Cycle"]) -> Iterator["Cycle"]:
    """Print a line a cycle, its text as a string."""
    for cycle in cycles:
        print(json.dumps(cycle.to_json() | {"text": cycle.text}), flush=True)
        yield cycle


def as_trees(cycles: Iterator["Cycle"]) -> Iterator["Cycle"]:
    """Print a heading, the tree and a sentence about it for each cycle."""
    from rich.console import Console
    from rich.text import Text

    from treespec.requests.events import explained

    console, tokens = Console(highlight=False), 0
    for cycle in cycles:
        tokens += cycle.new_tokens
        say(console, Text(heading(cycle, tokens / cycle.number), "bold"))
        say(console, picture(cycle))
        say(console, Text(explained(cycle) + "\n"))
        yield cycle


def say(console: "Console", shown: "Text | Tree") -> None:
    """Lines are not broken: a pipe has no width, and a terminal breaks them itself."""
    console.print(shown, soft_wrap=True, crop=False)
    console.file.flush()


def heading(cycle: "Cycle", tau: float) -> str:
    """`cycle 3 · 4 tokens · τ 2.67 so far · draft 4.1 ms (head 3.5), target 9.0 ms, …`."""
    ms = {stage: f"{1000 * seconds:.1f} ms" for stage, seconds in cycle.seconds.items()}
    of_draft_model = ms.pop("head")
    times = ", ".join(f"{stage} {spent}" for stage, spent in ms.items())
    times = times.replace(",", f" (head {of_draft_model}),", 1)
    count = f"{cycle.new_tokens} {'token' if cycle.new_tokens == 1 else 'tokens'}"
    return f"cycle {cycle.number} · {count} · τ {tau:.2f} so far · {times}"


def picture(cycle: "Cycle") -> "Tree":
    """The tree of a cycle; the target's own token stands below the node that it follows."""
    from rich.text import Text
    from rich.tree import Tree

    from treespec.requests.events import visible

    root = Tree(Text(visible(cycle.texts[0]), "bold"), guide_style="dim")
    branches = {0: root}
    for node in range(1, len(cycle.tokens)):
        accepted, token = node in cycle.path, visible(cycle.texts[node])
        said = Text(f"✓ {token}" if accepted else token, ACCEPTED if accepted else REFUSED)
        said.append(odds(cycle.q[node], cycle.p[node]), "not bold")
        style = "green" if accepted else "dim"
        branches[node] = branches[cycle.parents[node]].add(said, guide_style=style)
    own = Text(f"→ {visible(cycle.own.text)}", OWN)
    own.append(odds(cycle.own.q, cycle.own.p) + "  the target's own", "not bold")
    branches[cycle.own.at].add(own)
    return root


def odds(q: float | None, p: float | None) -> str:
    from treespec.requests.events import chance

    parts = [f"  {name} {chance(x)}" for name, x in (("q", q), ("p", p)) if x is not None]
    return "".join(parts)
