"""A generation cycle by cycle: each tree as it was drafted, what the target said of it, the times.

The generation is one like any other: the same decoder over the same parts, of which those that
draft are recorded (`treespec.draft.recorder`).
"""

from collections.abc import Iterator
from itertools import chain
from typing import Unpack

from torch import Tensor

from treespec.cycle import Cycle, OwnToken
from treespec.decode import Decoder, Piece
from treespec.draft.recorder import Recorded, heard, recorded
from treespec.draft.source import Model
from treespec.errors import InputError
from treespec.request import Options
from treespec.sampling import SamplingParams, probs
from treespec.shaping.law import Path
from treespec.spec import Spec
from treespec.text.prompts import Prompt
from treespec.trees.tree import TokenTree

STAGES = ("draft", "head", "target", "verify", "commit")


def trace(
    spec: Spec, prompt: Prompt, *, seed: int | None = None, **options: Unpack[Options]
) -> Iterator[Cycle]:
    """The cycles of `spec.generate` with this prompt and seed, as they come.

    It decodes with a cache and drafter of its own; `spec` may decode other texts meanwhile.
    Raises InputError as `Spec.stream` does, and for a spec without a drafter.
    """
    if spec.source is None:
        raise InputError(
            "a trace shows drafted trees, and nothing drafts: give --head or --drafter"
        )

    # 1. A decoder like the spec's, over a drafter that is recorded.
    cycles: list[Recorded] = []  # the present one
    logits: dict[Path, Tensor] = {}
    source = Model(heard(spec.proposer, logits)) if spec.proposer else spec.source
    rest = (spec.template, True, spec.calibration, spec.times)  # True: the verifier was allowed
    copy = Spec(spec.target, source, spec.policy, spec.verifier, *rest)
    assert copy.decoder.drafter
    drafter = recorded(copy.decoder.drafter, logits, cycles.append)
    text = copy.request(prompt, seed=seed, **options)
    decoder = Decoder(spec.target, drafter, spec.verifier, source.models)

    # 2. Its pieces, of which the target's own token ends a cycle; the answer may end before it.
    before, pieces, number = dict.fromkeys(STAGES, 0.0), [], 0
    for _, piece in chain(decoder.run([text]), [(text, None)]):
        if piece:
            pieces.append(piece)
        if not pieces or (piece and piece.drafted):
            continue
        number += 1
        now = {stage: text.stats.seconds[stage] for stage in STAGES}
        spent = {stage: now[stage] - before[stage] for stage in STAGES}
        yield _cycle(number, cycles.pop(), pieces, spent, spec, text.law.params)
        before, pieces = now, []


def _cycle(
    number: int,
    seen: Recorded,
    answer: list[Piece],
    seconds: dict[str, float],
    spec: Spec,
    params: SamplingParams,
) -> Cycle:
    # 1. The nodes that the walk can reach, numbered anew.
    tree = seen.tree
    kept = reachable(tree)
    number_of = {node: place for place, node in enumerate(kept)}
    tokens = tree.tokens[kept].tolist()
    parents = [number_of.get(parent, -1) for parent in tree.parents[kept].tolist()]
    path = [number_of[node] for node in seen.path]

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
    own_q = None if law is None else float(law[seen.own])
    rank = None if law is None else 1 + int((law > law[seen.own]).sum())
    after = _words(spec, tokens[at], seen.own)
    own = OwnToken(at, seen.own, after, float(laws[kept[at], seen.own]), own_q, rank)
    texts = [_words(spec, None, tokens[0])]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        texts.append(_words(spec, tokens[parent], token))
    return Cycle(number, tokens, texts, parents, q, p, path, own, answer, seconds)


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


def _words(spec: Spec, before: int | None, token: int) -> str:
    """A token's text where it follows another; `#7` without a tokenizer."""
    tokenizer = spec.target.tokenizer
    if tokenizer is None:
        return f"#{token}"

    def text(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    alone = text([token])
    if before is None:
        return alone
    left, both = text([before]), text([before, token])
    return both[len(left) :] if both.startswith(left) else alone
