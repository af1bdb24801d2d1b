"""How `treespec trace` shows a cycle: a heading, the drafted tree, and a sentence on what became of it."""

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from treespec.engine.events import Cycle, explained, percent, visible

ACCEPTED = "bold green"
OWN = "bold yellow"
REFUSED = "dim"


def show(cycle: Cycle, tau: float) -> None:
    """Print a cycle. tau: tokens per cycle so far."""
    console = Console(highlight=False)
    for part in (Text(heading(cycle, tau), "bold"), picture(cycle), Text(f"{explained(cycle)}\n")):
        console.print(part, soft_wrap=True, crop=False)  # a terminal breaks lines by itself
    console.file.flush()


def heading(cycle: Cycle, tau: float) -> str:
    """`cycle 3 · 4 tokens · τ 2.67 so far · draft 4.1 ms (head 3.5), target 9.0 ms, …`."""
    ms = {stage: f"{1000 * seconds:.1f} ms" for stage, seconds in cycle.seconds.items()}
    head = ms.pop("head")
    times = ", ".join(f"{stage} {spent}" for stage, spent in ms.items())
    times = times.replace(",", f" (head {head}),", 1)
    count = f"{cycle.new_tokens} tokens"
    if cycle.new_tokens == 1:
        count = "1 token"
    return f"cycle {cycle.number} · {count} · τ {tau:.2f} so far · {times}"


def picture(cycle: Cycle) -> Tree:
    """The tree of a cycle; the target's own token stands below the node that it follows."""
    root = Tree(Text(visible(cycle.texts[0]), "bold"), guide_style="dim")
    branches = [root]
    for node in range(1, len(cycle.tokens)):
        label = Text(visible(cycle.texts[node]), REFUSED)
        guide_style = "dim"
        if node in cycle.path:
            label = Text(f"✓ {visible(cycle.texts[node])}", ACCEPTED)
            guide_style = "green"
        label.append(odds(cycle.q[node], cycle.p[node]), "not bold")
        parent = branches[cycle.parents[node]]
        branches.append(parent.add(label, guide_style=guide_style))
    own = Text(f"→ {visible(cycle.own.text)}", OWN)
    own.append(odds(cycle.own.q, cycle.own.p) + "  the target's own", "not bold")
    branches[cycle.own.at].add(own)
    return root


def odds(q: float | None, p: float | None) -> str:
    """Such as `  q 31 %  p 28 %`; a probability that is unknown is left out."""
    text = ""
    if q is not None:
        text += f"  q {percent(q)}"
    if p is not None:
        text += f"  p {percent(p)}"
    return text
