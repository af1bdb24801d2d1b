"""What one cycle of a generation was: its tree, the probabilities of its nodes, what was accepted.

A node's q is the draft model's probability of its token given the path above, p is the target's:

    the ─┬─ cat  q .5  p .6      accepted
         │   └─ sat  q .4  p .1  not accepted: after `the cat` the target said `slept`, its own token
         └─ dog  q .2  p .3

At temperature 0 both are the models' probabilities at temperature 1, as the distributions that decode
are one-hot there.
"""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, final

from treespec.engine.request import Listener, Piece, Recorded
from treespec.engine.stats import Stats
from treespec.files.printable import one_line
from treespec.sampling.probs import SamplingParams, probs
from treespec.sampling.sampler import Path
from treespec.text.strings import text_after
from treespec.trees.tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@final
@dataclass(frozen=True)
class OwnToken:
    """The target's own token after the path. at: the node that it follows.

    q, rank: of the draft model, 1 for its most likely token; None where it drafted nothing there.
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

    tokens, texts, parents: of the nodes. q: None at the root and for drafters without a draft distribution.
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
        """The share of the target's distribution that the children of a node hold."""
        return sum(self.p[child] or 0.0 for child in self.children(node))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def visible(text: str) -> str:
    """A token's text in one line: outer spaces as ␣, line breaks as ↵, control characters as symbols.

    It may still hold markup: whoever shows it escapes it for the place.
    """
    line = one_line(text).replace("␊", "↵").replace("␉", "⇥")
    return re.sub("^ +| +$", lambda spaces: "␣" * len(spaces[0]), line)


def explained(cycle: Cycle) -> str:
    """Why the path ends where it does, in a sentence or two."""
    # 1. What was accepted.
    count = len(cycle.path)
    own = cycle.own
    drafted = len(cycle.tokens) - 1
    children = cycle.children(own.at)
    said = f"said “{visible(own.text)}” (p {percent(own.p)})"
    if not drafted:
        return f"Nothing was drafted; the target {said}."
    accepted = f"{count} of {drafted} drafted nodes {'is' if count == 1 else 'are'} accepted"
    if not children:
        return f"{accepted}, down to a leaf; then the target {said}."

    # 2. Where the target went elsewhere, and how far the draft model was from it.
    after = f"after “{visible(cycle.texts[own.at])}”" if own.at else "at once"
    verb = "one child there holds" if len(children) == 1 else f"{len(children)} children there hold"
    ranked = "" if own.rank is None else f", the draft model's choice number {own.rank}"
    likely = "" if own.q is None else f" (q {percent(own.q)})"
    return (
        f"{accepted}. The target went elsewhere {after}: the {verb} {percent(cycle.held(own.at))} of "
        f"its distribution, and it {said}{ranked}{likely}."
    )


def percent(value: float) -> str:
    """A probability in two digits: 0.62, and < 0.01 for what is not 0 but would look so."""
    return "< 0.01" if 0 < value < 0.005 else f"{value:.2f}"


STAGES = ("draft", "head", "target", "verify", "commit")


def reporting(
    on_cycle: Callable[[Cycle], object],
    tokenizer: "PreTrainedTokenizerBase | None",
    params: SamplingParams,
    stats: Stats,
) -> Listener:
    """A listener that calls `on_cycle` with each cycle of one sequence, whose counts are `stats`."""
    before = dict.fromkeys(STAGES, 0.0)

    def report(seen: Recorded) -> None:
        now = {stage: stats.seconds[stage] for stage in STAGES}
        spent = {stage: now[stage] - before[stage] for stage in STAGES}
        before.update(now)
        on_cycle(cycle_of(stats.cycles, seen, spent, tokenizer, params))

    return report


def cycle_of(
    number: int,
    seen: Recorded,
    seconds: dict[str, float],
    tokenizer: "PreTrainedTokenizerBase | None",
    params: SamplingParams,
) -> Cycle:
    """A cycle by its number. seconds: by stage."""
    # 1. The nodes that the walk can reach, numbered again.
    tree = seen.tree
    token = seen.verdict.tokens[-1]
    kept = reachable(tree)
    number_of = {node: place for place, node in enumerate(kept)}
    tokens = tree.tokens[kept].tolist()
    parents = [number_of.get(parent, -1) for parent in tree.parents[kept].tolist()]
    path = [number_of[node] for node in seen.verdict.path]
    paths: list[Path] = [()]
    for node in range(1, len(kept)):
        paths.append((*paths[parents[node]], tokens[node]))

    # 2. Distributions of draft and target. At temperature 0 they would be one-hot.
    shown = SamplingParams(1.0) if params.greedy else params
    p = probs(seen.logits[kept], shown)  # [N, V]
    q = {  # by path [V]; of several draft models the mean
        at: probs(rows, shown).reshape(-1, rows.shape[-1]).mean(0)
        for at, rows in seen.draft_logits.items()
    }

    def words(before: int | None, token: int) -> str:
        return f"#{token}" if tokenizer is None else text_after(tokenizer, before, token)

    def after(node: int, token: int) -> tuple[str, float, float | None]:
        """(text, p, q) of a token after a node."""
        probabilities = q.get(paths[node])
        likely = None if probabilities is None else float(probabilities[token])
        return words(tokens[node], token), float(p[node, token]), likely

    # 3. The nodes below the root, and what the target said after the path.
    root = (words(None, tokens[0]), None, None)
    nodes = zip(root, *map(after, parents[1:], tokens[1:]), strict=True)
    texts, p_of, q_of = map(list[Any], nodes)
    at = path[-1] if path else 0
    probabilities = q.get(paths[at])
    rank = None if probabilities is None else 1 + int((probabilities > probabilities[token]).sum())
    own = OwnToken(at, token, *after(at, token), rank)
    return Cycle(number, tokens, texts, parents, q_of, p_of, path, own, seen.answer, seconds)


def reachable(tree: TokenTree) -> list[int]:
    """The nodes but for absent draws, repeated draws and what is below them."""
    nodes: dict[tuple[int, int], int] = {}
    pairs = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    for node, (parent, token) in enumerate(pairs):
        if node == 0 or (token >= 0 and parent in nodes.values()):
            nodes.setdefault((parent, token), node)
    return list(nodes.values())
