"""How `treespec trace` shows a cycle: a heading, the drafted tree, and a sentence on what became of it."""

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from treespec.engine.events import Cycle, explain_end, format_percent, show_token

ACCEPTED_STYLE = "bold green"
OWN_STYLE = "bold yellow"
REFUSED_STYLE = "dim"


def show(cycle: Cycle, tau: float) -> None:
    """Print a cycle. tau: tokens per cycle so far."""
    console = Console(highlight=False)
    for part in (
        Text(format_heading(cycle, tau), "bold"),
        draw_tree(cycle),
        Text(f"{explain_end(cycle)}\n"),
    ):
        console.print(part, soft_wrap=True, crop=False)  # a terminal breaks lines by itself
    console.file.flush()


def format_heading(cycle: Cycle, tau: float) -> str:
    """`cycle 3 · 4 tokens · τ 2.67 so far · draft 4.1 ms (head 3.5), target 9.0 ms, …`."""
    ms = {stage: f"{1000 * seconds:.1f} ms" for stage, seconds in cycle.seconds.items()}
    head = ms.pop("head")
    times = ", ".join(f"{stage} {spent}" for stage, spent in ms.items())
    times = times.replace(",", f" (head {head}),", 1)
    count = f"{cycle.new_tokens} tokens"
    if cycle.new_tokens == 1:
        count = "1 token"
    return f"cycle {cycle.number} · {count} · τ {tau:.2f} so far · {times}"


def draw_tree(cycle: Cycle) -> Tree:
    """The tree of a cycle; the target's own token stands below the node that it follows."""
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
    """Such as `  q 31 %  p 28 %`; a probability that is unknown is left out."""
    text = ""
    if q is not None:
        text += f"  q {format_percent(q)}"
    if p is not None:
        text += f"  p {format_percent(p)}"
    return text
