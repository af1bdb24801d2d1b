"""What one cycle of a generation was: its tree, the probabilities of its nodes, what was accepted.

A node's q is the draft model's probability of its token given the path above, p is the target's:

    the ─┬─ cat  q .5  p .6      accepted
         │   └─ sat  q .4  p .1  not accepted: after `the cat` the target said `slept`, its own token
         └─ dog  q .2  p .3

At temperature 0 both are the models' probabilities at temperature 1, as the laws that decode are
one-hot there.
"""

from dataclasses import asdict, dataclass
from typing import Any, final

from treespec.decoding.sequence import Piece
from treespec.text.printable import one_line


@final
@dataclass(frozen=True)
class OwnToken:
    """The target's own token after the path. at: the node that it follows.

    q, rank: of the draft model, 1 for its likeliest token; None where it drafted nothing there.
    """

    at: int
    token: int
    text: str
    p: float
    q: float | None
    rank: int | None


@final
@dataclass(frozen=True)
class Cycle:
    """One cycle. number: from 1. Lists have an entry a node; node 0 is the root.

    tokens, texts, parents: of the nodes. q: None at the root and for drafters without a draft law.
    p: None at the root. path: accepted nodes, without the root. answer: what this cycle adds to the
    answer; its end may cut it. seconds: by stage; head is a part of draft.
    """

    number: int
    tokens: list[int]
    texts: list[str]
    parents: list[int]
    q: list[float | None]
    p: list[float | None]
    path: list[int]
    own: OwnToken
    answer: list[Piece]
    seconds: dict[str, float]

    @property
    def new_tokens(self) -> int:
        return sum(len(piece.token_ids) for piece in self.answer)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.answer)

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def held(self, node: int) -> float:
        """The share of the target's law that the children of a node hold."""
        return sum(self.p[child] or 0.0 for child in self.children(node))

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        for piece in fields["answer"]:
            if piece["logprobs"] is None:
                del piece["logprobs"]
        return fields

    @staticmethod
    def from_json(fields: dict[str, Any]) -> "Cycle":
        """Raises KeyError or TypeError for what no cycle was written as."""
        own = OwnToken(**fields["own"])
        answer = [Piece(**piece) for piece in fields["answer"]]
        return Cycle(**fields | {"own": own, "answer": answer})


def visible(text: str) -> str:
    """A token's text in one line: outer spaces as ␣, line breaks as ↵, control characters as symbols.

    It may still hold markup: whoever shows it escapes it for the place.
    """
    line = one_line(text).replace("␊", "↵").replace("␉", "⇥")
    inner = line.strip(" ")
    if not inner:
        return "␣" * len(line)
    left = len(line) - len(line.lstrip(" "))
    return "␣" * left + inner + "␣" * (len(line) - left - len(inner))


def explained(cycle: Cycle) -> str:
    """Why the path ends where it does, in a sentence or two."""
    # 1. What was accepted.
    count, own = len(cycle.path), cycle.own
    drafted, children = len(cycle.tokens) - 1, cycle.children(own.at)
    said = f"said “{visible(own.text)}” (p {chance(own.p)})"
    if not drafted:
        return f"Nothing was drafted; the target {said}."
    accepted = f"{count} of {drafted} drafted nodes {'is' if count == 1 else 'are'} accepted"
    if not children:
        return f"{accepted}, down to a leaf; then the target {said}."

    # 2. Where the target went elsewhere, and how far the draft model was from it.
    after = f"after “{visible(cycle.texts[own.at])}”" if own.at else "at once"
    verb = "one child there holds" if len(children) == 1 else f"{len(children)} children there hold"
    ranked = "" if own.rank is None else f", the draft model's choice number {own.rank}"
    likely = "" if own.q is None else f" (q {chance(own.q)})"
    return (
        f"{accepted}. The target went elsewhere {after}: the {verb} {chance(cycle.held(own.at))} of "
        f"its law, and it {said}{ranked}{likely}."
    )


def chance(value: float) -> str:
    """A probability in two digits: 0.62, and < 0.01 for what is not 0 but would look so."""
    return "< 0.01" if 0 < value < 0.005 else f"{value:.2f}"
