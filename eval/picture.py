"""A drafted tree as a drawing: a column a depth, a row a leaf, thick lines where the target goes.

the ─┬─ cat ─┬─ sat
     │       └─ slept   the target's own token
     └─ dog
"""

from dataclasses import dataclass
from typing import Literal

from treespec.requests.events import Cycle, OwnToken, chance, visible

BOX, HEIGHT = 86, 30  # pixels of a node
COLUMN, ROW = BOX + 28, HEIGHT + 5  # from one node to the next
LONGEST = 11  # characters of a token in its box
THICKEST = 6.0  # pixels of a line that the target takes for certain

Fate = Literal["root", "accepted", "refused", "own"]


@dataclass(frozen=True)
class Node:
    """x, y: pixels of its left upper corner. fate: what became of it.

    reach: Pr(the target's own text runs through it). parent: None at the root.
    """

    x: int
    y: int
    fate: Fate
    token: str
    odds: str
    about: str
    p: float
    reach: float
    parent: "Node | None"

    @property
    def line(self) -> str:
        """The curve from the parent, as SVG's path."""
        assert self.parent
        left, right = self.parent.x + BOX, self.x
        above, below = self.parent.y + HEIGHT // 2, self.y + HEIGHT // 2
        middle = (left + right) // 2
        return f"M{left} {above} C{middle} {above} {middle} {below} {right} {below}"

    @property
    def thickness(self) -> float:
        return 1 + (THICKEST - 1) * self.reach


@dataclass(frozen=True)
class Picture:
    """nodes: parents first. width, height: pixels."""

    nodes: list[Node]
    width: int
    height: int


def picture(cycle: Cycle) -> Picture:
    """The tree of a cycle, the target's own token as a child of the node that it follows."""
    # 1. Children of each node; the own token is the last child of its node, as number N.
    own = len(cycle.tokens)
    parents = [*cycle.parents, cycle.own.at]
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], 1):
        children[parent].append(node)

    # 2. Rows: a node stands beside its first child, a leaf below all before it.
    row: dict[int, int] = {}
    leaves = 0
    for node in _leaves_first(children):
        if children[node]:
            row[node] = row[children[node][0]]
        else:
            row[node] = leaves
            leaves += 1

    # 3. Boxes, from the root down.
    drawn: list[Node] = []
    accepted = set(cycle.path)
    column = [0]
    for node, parent in enumerate(parents):
        above = drawn[parent] if node else None
        column += [column[parent] + 1] if node else []
        place = 2 + column[node] * COLUMN, 2 + row[node] * ROW
        p = cycle.own.p if node == own else cycle.p[node] or 0.0
        q = cycle.own.q if node == own else cycle.q[node]
        text = cycle.own.text if node == own else cycle.texts[node]
        fate: Fate = "accepted" if node in accepted else "refused"
        fate = "root" if node == 0 else "own" if node == own else fate
        reach = above.reach * p if above else 1.0
        about = _about(text, q, p, reach, fate, cycle.own)
        odds = "" if node == 0 else _odds(q, p)
        drawn.append(Node(*place, fate, _cut(visible(text)), odds, about, p, reach, above))
    width = max(node.x for node in drawn) + BOX + 2
    return Picture(drawn, width, leaves * ROW + 2)


def expected(cycle: Cycle) -> float:
    """Tokens for which a text of the target's would stay in the tree, on average."""
    reach = [1.0]
    for p, parent in zip(cycle.p[1:], cycle.parents[1:], strict=True):
        reach.append(reach[parent] * (p or 0.0))
    return sum(reach[1:])


def _leaves_first(children: list[list[int]]) -> list[int]:
    """All nodes, each after those below it; leaves from the first branch to the last."""
    order: list[int] = []
    waiting = [(0, False)]
    while waiting:
        node, seen = waiting.pop()
        if seen or not children[node]:
            order.append(node)
        else:
            waiting.append((node, True))
            waiting += [(child, False) for child in reversed(children[node])]
    return order


def _odds(q: float | None, p: float) -> str:
    """`q .52  p .61`."""
    parts = [f"{name} {_brief(x)}" for name, x in (("q", q), ("p", p)) if x is not None]
    return "  ".join(parts)


def _brief(x: float) -> str:
    """.52; 1 for what rounds to it, and <.01 for what is not 0 but would look so."""
    text = f"{x:.2f}"
    if text == "0.00":
        return "<.01" if x else "0"
    return "1" if text == "1.00" else text.removeprefix("0")


def _about(text: str, q: float | None, p: float, reach: float, fate: Fate, said: OwnToken) -> str:
    """What a pointer that rests on a node is told."""
    if fate == "root":
        return f"“{visible(text)}”: the last token of the text before"
    parts = [f"“{visible(text)}”"]
    parts += [] if q is None else [f"draft model q {chance(q)}"]
    parts += [f"target p {chance(p)}", f"the target's text runs through here: {chance(reach)}"]
    if fate == "own":
        parts.append("the target's own token")
        parts += [f"the draft model's choice number {said.rank}"] if said.rank else []
    else:
        parts.append("accepted" if fate == "accepted" else "not accepted")
    return ", ".join(parts)


def _cut(token: str) -> str:
    return token if len(token) <= LONGEST else token[: LONGEST - 1] + "…"
