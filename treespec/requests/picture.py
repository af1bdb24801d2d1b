"""A drafted tree for the eye: each token with its probabilities, and what became of it.

the
├── ✓ cat  q 0.52  p 0.61
│   └── → sat  p 0.70  the target's own
└── dog  q 0.25  p 0.30
"""

from rich.text import Text
from rich.tree import Tree

from treespec.requests.events import Cycle, chance, visible

ACCEPTED, OWN, REFUSED = "bold green", "bold yellow", "dim"


def picture(cycle: Cycle) -> Tree:
    """The tree of a cycle; the target's own token stands below the node that it follows."""
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
    parts = [f"  {name} {chance(x)}" for name, x in (("q", q), ("p", p)) if x is not None]
    return "".join(parts)
