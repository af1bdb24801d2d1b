"""Print a cycle for `treespec trace`: a heading, the drafted tree, and a sentence that explains its end."""

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from treespec.engine.events import Cycle, explain_end, format_percent, show_token

ACCEPTED_STYLE = "bold green"
OWN_STYLE = "bold yellow"
REFUSED_STYLE = "dim"


def show(cycle: Cycle, tau: float) -> None:
    """Print a cycle. tau: mean number of tokens per cycle so far."""
    console = Console(highlight=False)
    for part in (
        Text(format_heading(cycle, tau), "bold"),
        draw_tree(cycle),
        Text(f"{explain_end(cycle)}\n"),
    ):
        console.print(part, soft_wrap=True, crop=False)  # a terminal breaks lines by itself
    console.file.flush()


def format_heading(cycle: Cycle, tau: float) -> str:
    """Format a heading such as `cycle 3 · 4 tokens · τ 2.67 so far · draft 4.1 ms (head 3.5), target 9.0 ms, …`."""
    ms = {stage: f"{1000 * seconds:.1f} ms" for stage, seconds in cycle.seconds.items()}
    head = ms.pop("head")
    times = ", ".join(f"{stage} {spent}" for stage, spent in ms.items())
    times = times.replace(",", f" (head {head}),", 1)
    count = f"{cycle.new_tokens} tokens"
    if cycle.new_tokens == 1:
        count = "1 token"
    return f"cycle {cycle.number} · {count} · τ {tau:.2f} so far · {times}"


def draw_tree(cycle: Cycle) -> Tree:
    """Draw the tree of a cycle, with the token sampled from the target below the last accepted node.

    A tree of four draft tokens below the root `The`; two were accepted, and the target continued with `blue`:

        The
        ├── ✓ ␣sky  q 0.61  p 0.55
        │   ├── ✓ ␣is  q 0.70  p 0.64
        │   │   └── → ␣blue  q 0.10  p 0.50  the target's own
        │   └── ␣was  q 0.20  p 0.25
        └── ␣sea  q 0.14  p 0.09
    """
    root = Tree(Text(show_token(cycle.texts[0]), "bold"), guide_style="dim")
    branches = [root]
    for node in range(1, len(cycle.tokens)):
        label = Text(show_token(cycle.texts[node]), REFUSED_STYLE)
        guide_style = "dim"
        if node in cycle.path:
            label = Text(f"✓ {show_token(cycle.texts[node])}", ACCEPTED_STYLE)
            guide_style = "green"
        label.append(format_odds(cycle.q[node], cycle.p[node]), "not bold")
        parent = branches[cycle.parents[node]]
        branches.append(parent.add(label, guide_style=guide_style))
    own = Text(f"→ {show_token(cycle.own.text)}", OWN_STYLE)
    own.append(format_odds(cycle.own.q, cycle.own.p) + "  the target's own", "not bold")
    branches[cycle.own.at].add(own)
    return root


def format_odds(q: float | None, p: float | None) -> str:
    """Format probabilities such as `  q 0.31  p 0.28`; an unknown one is left out."""
    text = ""
    if q is not None:
        text += f"  q {format_percent(q)}"
    if p is not None:
        text += f"  p {format_percent(p)}"
    return text
