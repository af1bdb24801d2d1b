"""What a cycle was, told with words and probabilities: `Recorded` becomes a `Cycle`."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from treespec.decoding.sequence import Listener, Recorded
from treespec.decoding.stats import Stats
from treespec.requests.cycle import Cycle, OwnToken
from treespec.shaping.law import Path
from treespec.shaping.sampling import SamplingParams, probs
from treespec.trees.tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STAGES = ("draft", "head", "target", "verify", "commit")


def telling(
    on_cycle: Callable[[Cycle], object],
    tokenizer: "PreTrainedTokenizerBase | None",
    params: SamplingParams,
    stats: Stats,
) -> Listener:
    """A listener that calls `on_cycle` with each cycle of one text, whose counts are `stats`."""
    before = dict.fromkeys(STAGES, 0.0)

    def heard(seen: Recorded) -> None:
        now = {stage: stats.seconds[stage] for stage in STAGES}
        spent = {stage: now[stage] - before[stage] for stage in STAGES}
        before.update(now)
        on_cycle(cycle_of(stats.cycles, seen, spent, tokenizer, params))

    return heard


def cycle_of(
    number: int,
    seen: Recorded,
    seconds: dict[str, float],
    tokenizer: "PreTrainedTokenizerBase | None",
    params: SamplingParams,
) -> Cycle:
    """A cycle by its number. seconds: by stage."""
    # 1. The nodes that the walk can reach, numbered anew.
    tree = seen.tree
    kept = reachable(tree)
    number_of = {node: place for place, node in enumerate(kept)}
    tokens = tree.tokens[kept].tolist()
    parents = [number_of.get(parent, -1) for parent in tree.parents[kept].tolist()]
    path = [number_of[node] for node in seen.verdict.path]
    own_token = seen.verdict.tokens[-1]

    # 2. Draft laws and target laws. At temperature 0 they would be one-hot.
    shown = SamplingParams(1.0) if params.greedy else params
    laws = probs(seen.logits, shown)  # [N, V]
    paths: list[Path] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    drafted = {at: _mean(probs(rows, shown)) for at, rows in seen.draft_logits.items()}

    # 3. Probabilities of the nodes.
    drawn = {} if params.greedy else _drawn(tree)
    p: list[float | None] = [None]
    q: list[float | None] = [None]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        p.append(float(laws[kept[parent], token]))
        law = drafted.get(paths[parent])
        likely = None if law is None else float(law[token])
        q.append(drawn.get((kept[parent], token), likely))

    # 4. What the target said after the path.
    at = path[-1] if path else 0
    law = drafted.get(paths[at])
    own_q = None if law is None else float(law[own_token])
    rank = None if law is None else 1 + int((law > law[own_token]).sum())
    after = _words(tokenizer, tokens[at], own_token)
    own = OwnToken(at, own_token, after, float(laws[kept[at], own_token]), own_q, rank)
    texts = [_words(tokenizer, None, tokens[0])]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        texts.append(_words(tokenizer, tokens[parent], token))
    return Cycle(number, tokens, texts, parents, q, p, path, own, seen.answer, seconds)


def reachable(tree: TokenTree) -> list[int]:
    """The nodes but for absent draws, repeated draws and what is below them."""
    nodes: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(
        zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    ):
        above = node == 0 or (token >= 0 and parent in nodes.values())
        if above:
            nodes.setdefault((parent, token), node)
    return list(nodes.values())


def _drawn(tree: TokenTree) -> dict[tuple[int, int], float]:
    """By node and token, the probability of the law that the first draw of that token came from."""
    if tree.drafts is None:
        return {}
    tokens = tree.drafts.draws.tokens
    at = tokens.clamp_min(0)
    if tree.drafts.q.dim() == 2:
        chances = tree.drafts.q.gather(1, at)
    else:
        chances = tree.drafts.q.gather(2, at[..., None]).squeeze(2)
    found: dict[tuple[int, int], float] = {}
    rows = zip(tree.drafts.nodes.tolist(), tokens.tolist(), chances.tolist(), strict=True)
    for node, drawn, likely in rows:
        for token, chance in zip(drawn, likely, strict=True):
            found.setdefault((node, token), chance)
    return found


def _mean(laws: Tensor) -> Tensor:
    """[V] one draft model's law, or the mean of several models' laws [M, V]."""
    return laws if laws.dim() == 1 else laws.mean(0)


def _words(tokenizer: "PreTrainedTokenizerBase | None", before: int | None, token: int) -> str:
    """A token's text where it follows another; `#7` without a tokenizer."""
    if tokenizer is None:
        return f"#{token}"

    def text(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    alone = text([token])
    if before is None:
        return alone
    left, both = text([before]), text([before, token])
    return both[len(left) :] if both.startswith(left) else alone
