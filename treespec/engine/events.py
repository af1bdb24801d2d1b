"""Records of a generation's cycles: the tree, the probabilities of its nodes, the accepted path.

A node's q is the draft model's probability of its token given the path above, p is the target's:

    the ─┬─ cat  q .5  p .6      accepted
         │   └─ sat  q .4  p .1  not accepted: after `the cat` the target chose `slept`, its own token
         └─ dog  q .2  p .3

At temperature 0 the distributions that decode are one-hot, so both are the models' probabilities at
temperature 1.
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
    """The token that the target adds after the accepted path.

    Attributes:
        at: The node that it follows.
        token: Its id.
        text: Its text.
        p: The target's probability of it.
        q: The draft model's probability of it; None if the draft model was not asked at that node.
        rank: Its rank by the draft model's probability, from 1; None as for q.
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
    """One cycle of a generation. Lists have one entry for each node; node 0 is the root.

    Attributes:
        number: Of the cycle, from 1.
        tokens: Token id of each node.
        texts: Text of each node.
        parents: Parent of each node; -1 for the root.
        q: The draft model's probability of each node given its path; None at the root, and for
            drafters without a draft distribution.
        p: The target's probability of each node given its path; None at the root.
        path: The accepted nodes, without the root.
        own: The token that the target adds after them.
        answer: The pieces that this cycle adds to the answer. If the answer ends within the accepted
            tokens, they are fewer.
        seconds: By stage; the stage `head` is a part of `draft`.
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
        """The target's probability that the next token is one of a node's children."""
        probability = 0.0
        for child in self.children(node):
            p = self.p[child]
            if p is not None:
                probability += p
        return probability

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def show_token(text: str) -> str:
    """Write a token's text in one line: outer spaces as ␣, line breaks as ↵, control characters as symbols.

    The result may contain markup (HTML, rich): the caller escapes it.
    """
    line = to_one_line(text).replace("␊", "↵").replace("␉", "⇥")
    return re.sub("^ +| +$", lambda spaces: "␣" * len(spaces[0]), line)


def explain_end(cycle: Cycle) -> str:
    """Explain in a sentence or two why a cycle's path ends at its last node."""
    # 1. The accepted nodes.
    count = len(cycle.path)
    target_token = cycle.own
    drafted = len(cycle.tokens) - 1
    children = cycle.children(target_token.at)
    target_said = f"said “{show_token(target_token.text)}” (p {format_percent(target_token.p)})"
    if not drafted:
        return f"Nothing was drafted; the target {target_said}."
    accepted = f"{count} of {drafted} drafted tokens accepted"
    if not children:
        return f"{accepted}, down to a leaf; then the target {target_said}."

    # 2. The node at which the target left the tree, and the draft model's rank of the target's token.
    position = "at once"
    if target_token.at:
        position = f"after “{show_token(cycle.texts[target_token.at])}”"
    children_hold = f"{len(children)} children there hold"
    if len(children) == 1:
        children_hold = "one child there holds"
    draft_choice = ""
    if target_token.rank is not None:
        draft_choice = f", the draft model's choice number {target_token.rank}"
    if target_token.q is not None:
        draft_choice += f" (q {format_percent(target_token.q)})"
    return (
        f"{accepted}. The target went elsewhere {position}: the {children_hold} "
        f"{format_percent(cycle.held(target_token.at))} of its distribution, and it {target_said}{draft_choice}."
    )


def format_percent(value: float) -> str:
    """Write a probability in two digits: 0.62; a positive one that would round to 0.00 becomes `< 0.01`."""
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
    """Build the listener of one request that calls `on_cycle` with each of its cycles.

    Args:
        on_cycle: Called after each cycle.
        tokenizer: Of the target; None: tokens are written as numbers.
        params: The request's sampling parameters.
        stats: The request's counts and seconds.
    """
    last_seconds = dict.fromkeys(CYCLE_STAGES, 0.0)

    def report(record: CycleRecord) -> None:
        cycle_seconds = {}
        for stage in CYCLE_STAGES:
            cycle_seconds[stage] = stats.seconds[stage] - last_seconds[stage]
            last_seconds[stage] = stats.seconds[stage]
        on_cycle(build_cycle(stats.cycles, record, cycle_seconds, tokenizer, params))

    return report


def build_cycle(
    number: int,
    record: CycleRecord,
    seconds: dict[str, float],
    tokenizer: "PreTrainedTokenizerBase | None",
    params: SamplingParams,
) -> Cycle:
    """Turn the decoder's record of a cycle into a `Cycle`.

    Args:
        number: Of the cycle, from 1.
        record: The tree, the processed logits and the verdict.
        seconds: Of this cycle, by stage.
        tokenizer: Of the target; None: tokens are written as numbers.
        params: The request's sampling parameters.
    """
    # 1. The nodes that a verifier can visit, renumbered.
    tree = record.tree
    target_token = record.verdict.tokens[-1]
    reachable_nodes = list_reachable_nodes(tree)
    new_numbers = {node: number for number, node in enumerate(reachable_nodes)}
    tokens = tree.tokens[reachable_nodes].tolist()
    parents = [new_numbers.get(parent, -1) for parent in tree.parents[reachable_nodes].tolist()]
    accepted_path = [new_numbers[node] for node in record.verdict.path]
    paths: list[Path] = [()]
    for node in range(1, len(tokens)):
        paths.append((*paths[parents[node]], tokens[node]))

    # 2. Distributions of draft and target. At temperature 0 they would be one-hot.
    if params.greedy:
        params = SamplingParams(1.0)
    target_probs = compute_probs(record.logits[reachable_nodes], params)  # [N, V]
    draft_probs: dict[Path, Tensor] = {}  # [V] by path; the mean of several draft models
    for path, logits in record.draft_logits.items():
        draft_probs[path] = compute_probs(logits, params).reshape(-1, logits.shape[-1]).mean(0)

    # 3. The nodes below the root.
    texts = [decode_token_after(tokenizer, None, tokens[0])]
    node_p: list[float | None] = [None]
    node_q: list[float | None] = [None]
    for node in range(1, len(tokens)):
        parent = parents[node]
        texts.append(decode_token_after(tokenizer, tokens[parent], tokens[node]))
        node_p.append(float(target_probs[parent, tokens[node]]))
        parent_probs = draft_probs.get(paths[parent])
        if parent_probs is None:
            node_q.append(None)
        else:
            node_q.append(float(parent_probs[tokens[node]]))

    # 4. The target's own token, after the last accepted node.
    last = 0
    if accepted_path:
        last = accepted_path[-1]
    own_q = None
    rank = None
    last_probs = draft_probs.get(paths[last])
    if last_probs is not None:
        own_q = float(last_probs[target_token])
        rank = 1 + int((last_probs > last_probs[target_token]).sum())
    text = decode_token_after(tokenizer, tokens[last], target_token)
    own_p = float(target_probs[last, target_token])
    own_token = OwnToken(last, target_token, text, own_p, own_q, rank)
    return Cycle(
        number,
        tokens,
        texts,
        parents,
        node_q,
        node_p,
        accepted_path,
        own_token,
        record.answer,
        seconds,
    )


def decode_token_after(
    tokenizer: "PreTrainedTokenizerBase | None", previous_token: int | None, token: int
) -> str:
    """Decode a token that follows another one; without a tokenizer, write its number."""
    if tokenizer is None:
        return f"#{token}"
    return decode_after(tokenizer, previous_token, token)


def list_reachable_nodes(tree: TokenTree) -> list[int]:
    """List the nodes that a path can lead to: all except absent draws, repeated draws and their descendants."""
    nodes: dict[tuple[int, int], int] = {}  # by parent and token
    parents_and_tokens = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    for node, (parent, token) in enumerate(parents_and_tokens):
        if node == 0 or (token >= 0 and parent in nodes.values()):
            nodes.setdefault((parent, token), node)
    return list(nodes.values())
