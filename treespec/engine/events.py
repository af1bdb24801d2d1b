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

from treespec.engine.request import CycleRecord, Listener, Piece
from treespec.engine.stats import Stats
from treespec.files.printable import to_one_line
from treespec.sampling.probs import SamplingParams, compute_probs
from treespec.sampling.sampler import Path
from treespec.text.strings import decode_after
from treespec.trees.tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor
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
        share = 0.0
        for child in self.children(node):
            p = self.p[child]
            if p is not None:
                share += p
        return share

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def show_token(text: str) -> str:
    """A token's text in one line: outer spaces as ␣, line breaks as ↵, control characters as symbols.

    It may still hold markup: whoever shows it escapes it for the place.
    """
    line = to_one_line(text).replace("␊", "↵").replace("␉", "⇥")
    return re.sub("^ +| +$", lambda spaces: "␣" * len(spaces[0]), line)


def explain_end(cycle: Cycle) -> str:
    """Why the path ends where it does, in a sentence or two."""
    # 1. What was accepted.
    count = len(cycle.path)
    own = cycle.own
    drafted = len(cycle.tokens) - 1
    children = cycle.children(own.at)
    said = f"said “{show_token(own.text)}” (p {format_percent(own.p)})"
    if not drafted:
        return f"Nothing was drafted; the target {said}."
    verb = "are"
    if count == 1:
        verb = "is"
    accepted = f"{count} of {drafted} drafted nodes {verb} accepted"
    if not children:
        return f"{accepted}, down to a leaf; then the target {said}."

    # 2. Where the target went elsewhere, and how far the draft model was from it.
    after = "at once"
    if own.at:
        after = f"after “{show_token(cycle.texts[own.at])}”"
    they_hold = f"{len(children)} children there hold"
    if len(children) == 1:
        they_hold = "one child there holds"
    of_draft = ""
    if own.rank is not None:
        of_draft = f", the draft model's choice number {own.rank}"
    if own.q is not None:
        of_draft += f" (q {format_percent(own.q)})"
    return (
        f"{accepted}. The target went elsewhere {after}: the {they_hold} "
        f"{format_percent(cycle.held(own.at))} of its distribution, and it {said}{of_draft}."
    )


def format_percent(value: float) -> str:
    """A probability in two digits: 0.62, and < 0.01 for what is not 0 but would look so."""
    if 0 < value < 0.005:
        return "< 0.01"
    return f"{value:.2f}"


CYCLE_STAGES = ("draft", "head", "target", "verify", "commit")


def build_listener(
    on_cycle: Callable[[Cycle], object],
    tokenizer: "PreTrainedTokenizerBase | None",
    params: SamplingParams,
    stats: Stats,
) -> Listener:
    """A listener that calls `on_cycle` with each cycle of one sequence, whose counts are `stats`."""
    before = dict.fromkeys(CYCLE_STAGES, 0.0)

    def report(seen: CycleRecord) -> None:
        spent = {}
        for stage in CYCLE_STAGES:
            spent[stage] = stats.seconds[stage] - before[stage]
            before[stage] = stats.seconds[stage]
        on_cycle(build_cycle(stats.cycles, seen, spent, tokenizer, params))

    return report


def build_cycle(
    number: int,
    seen: CycleRecord,
    seconds: dict[str, float],
    tokenizer: "PreTrainedTokenizerBase | None",
    params: SamplingParams,
) -> Cycle:
    """A cycle by its number. seconds: by stage."""
    # 1. The nodes that the walk can reach, numbered again.
    tree = seen.tree
    token = seen.verdict.tokens[-1]
    kept = list_reachable_nodes(tree)
    number_of = {node: place for place, node in enumerate(kept)}
    tokens = tree.tokens[kept].tolist()
    parents = [number_of.get(parent, -1) for parent in tree.parents[kept].tolist()]
    path = [number_of[node] for node in seen.verdict.path]
    paths: list[Path] = [()]
    for node in range(1, len(kept)):
        paths.append((*paths[parents[node]], tokens[node]))

    # 2. Distributions of draft and target. At temperature 0 they would be one-hot.
    if params.greedy:
        params = SamplingParams(1.0)
    p = compute_probs(seen.logits[kept], params)  # [N, V]
    q: dict[Path, Tensor] = {}  # [V] by path; of several draft models the mean
    for path_above, rows in seen.draft_logits.items():
        q[path_above] = compute_probs(rows, params).reshape(-1, rows.shape[-1]).mean(0)

    # 3. The nodes below the root.
    texts = [decode_token_after(tokenizer, None, tokens[0])]
    p_of: list[float | None] = [None]
    q_of: list[float | None] = [None]
    for node in range(1, len(kept)):
        parent = parents[node]
        texts.append(decode_token_after(tokenizer, tokens[parent], tokens[node]))
        p_of.append(float(p[parent, tokens[node]]))
        q_above = q.get(paths[parent])
        if q_above is None:
            q_of.append(None)
        else:
            q_of.append(float(q_above[tokens[node]]))

    # 4. What the target said after the path.
    last = 0
    if path:
        last = path[-1]
    own_q = None
    rank = None
    q_last = q.get(paths[last])
    if q_last is not None:
        own_q = float(q_last[token])
        rank = 1 + int((q_last > q_last[token]).sum())
    text = decode_token_after(tokenizer, tokens[last], token)
    own = OwnToken(last, token, text, float(p[last, token]), own_q, rank)
    return Cycle(number, tokens, texts, parents, q_of, p_of, path, own, seen.answer, seconds)


def decode_token_after(
    tokenizer: "PreTrainedTokenizerBase | None", before: int | None, token: int
) -> str:
    """The text of a token after another one; its number without a tokenizer."""
    if tokenizer is None:
        return f"#{token}"
    return decode_after(tokenizer, before, token)


def list_reachable_nodes(tree: TokenTree) -> list[int]:
    """The nodes but for absent draws, repeated draws and what is below them."""
    nodes: dict[tuple[int, int], int] = {}
    pairs = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    for node, (parent, token) in enumerate(pairs):
        if node == 0 or (token >= 0 and parent in nodes.values()):
            nodes.setdefault((parent, token), node)
    return list(nodes.values())
