"""Sampled texts as numbers: the place of each token in the plain model's law and in the draft's.

Nothing comes from the verifier: p is that of the plain model's forward over the whole text. q only
orders the tokens. So any function of the text before a token serves; it need not be the law that
the draft used.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from treespec.api.spec import Spec
from treespec.draft.trained.kinds import KINDS
from treespec.eval.certify.witness import Cycle, placed
from treespec.shaping.sampling import SamplingParams, probs

NOTHING: Mapping[str, Any] = MappingProxyType({})
AT_ONCE = 1 << 23  # probabilities in one tensor


@dataclass(frozen=True)
class Sample:
    """A sampled text.

    group: the number of its pair of prompt and law. params: the law.
    cycles: what the witness kept; none for a plain text.
    """

    group: int
    prompt: list[int]
    output: list[int]
    params: SamplingParams
    cycles: Sequence[Cycle] = field(default=())


@dataclass(frozen=True)
class Places:
    """The places of a text's tokens, numbers in [0, 1] (`placed`).

    by_ratio, by_p, by_number: [n] places in the plain law, tokens ordered by p/q, by p, by number.
    rank: [n] places in q, tokens ordered by q.
    first: [c] by_number of the first token of each cycle.
    first_by_ratio: places of these tokens in the plain law, ordered by p over the root's q; only of
    cycles whose root has draws.
    """

    by_ratio: Tensor
    by_p: Tensor
    by_number: Tensor
    rank: Tensor
    first: Tensor
    first_by_ratio: Tensor


@torch.no_grad()
def places(
    spec: Spec, samples: Sequence[Sample], changes: Mapping[str, Any] = NOTHING
) -> list[Places]:
    """The places of texts that were sampled by one law.

    changes: options of `Spec.generate` that change the logits.
    """
    coins = torch.Generator().manual_seed(len(samples))
    longest = max(len(sample.output) for sample in samples)
    size = max(1, AT_ONCE // (longest * spec.target.vocab_size))
    all_places: list[Places] = []
    for start in range(0, len(samples), size):
        all_places += _places(spec, samples[start : start + size], changes, coins)
    return all_places


def _places(
    spec: Spec, samples: Sequence[Sample], changes: Mapping[str, Any], coins: torch.Generator
) -> Iterator[Places]:
    """The places of the texts of one forward."""
    target, head = spec.target, spec.head
    # 1. One plain forward over the texts, padded on the right.
    texts = [sample.prompt + sample.output for sample in samples]
    longest = max(map(len, texts))
    padded = [text + [0] * (longest - len(text)) for text in texts]
    rows = torch.tensor(padded).to(target.output_device)
    taps = head.taps if head else ()
    features, last = target.parted(target.features(rows, taps, last=True), taps)
    for row, (sample, tokens) in enumerate(zip(samples, texts, strict=True)):
        # 2. The laws p and q [n, V] of each new token, and the token [n, 1].
        first, end = len(sample.prompt) - 1, len(tokens) - 1
        logits = target.output_logits(last[row, first:end])
        if changes:
            law = spec.request(sample.prompt, **changes).law
            logits = law.shape([tuple(sample.output[:n]) for n in range(end - first)], logits)
        p = probs(logits, sample.params)
        known, known_features = rows[row, : end + 1], features[row, : end + 1]
        q = draft_law(spec, known, known_features, first, sample.params)
        chosen = rows[row, first + 1 : end + 1, None]
        number = torch.arange(p.shape[1], device=p.device).expand_as(p)

        # 3. The places of all tokens.
        orders = (p / q.clamp(min=torch.finfo(q.dtype).tiny), p, number)
        by_ratio, by_p, by_number = (
            placed(p, order, chosen, coins).squeeze(1).cpu() for order in orders
        )
        rank = placed(q, q, chosen, coins).squeeze(1).cpu()

        # 4. The places of the first token of each cycle.
        begins = starts(sample)
        drafted = [(at, cycle.root_law) for at, cycle in begins if cycle.root_law is not None]
        first_by_ratio = by_p[:0]
        if drafted:
            at = torch.tensor([at for at, _ in drafted], device=p.device)
            root_q = torch.stack([law for _, law in drafted])
            order = p[at] / root_q.clamp(min=torch.finfo(root_q.dtype).tiny)
            first_by_ratio = placed(p[at], order, chosen[at], coins).squeeze(1).cpu()
        first_by_number = by_number[[at for at, _ in begins]]
        yield Places(by_ratio, by_p, by_number, rank, first_by_number, first_by_ratio)


def starts(sample: Sample) -> list[tuple[int, Cycle]]:
    """Where in the output each cycle begins. Nothing for an output that the cycles did not commit.

    Two cycles of three and two tokens, of which the text keeps the first four, begin at 0 and 3:

        cycles    a b c | d e         output    a b c d
    """
    committed = [token for cycle in sample.cycles for token in cycle.tokens]
    if committed[: len(sample.output)] != sample.output:
        return []
    begins, at = [], 0
    for cycle in sample.cycles:
        if at < len(sample.output):
            begins.append((at, cycle))
        at += len(cycle.tokens)
    return begins


def draft_law(
    spec: Spec, tokens: Tensor, features: Tensor, first: int, params: SamplingParams
) -> Tensor:
    """[n, V] a law for each token behind position `first`: a head's first draft step, or `repeats`.

    Row t of a draft step is the law of token t + 2. For five tokens and first = 1:

        tokens         0  1 | 2  3  4        n = 3
        rows of q             0  1  2        the law of token 2 is row 0

    With first = 0 token 1 has no row; a uniform law stands for it.
    tokens: [T]. features: [T, F] the head's input.
    """
    # 1. Without a head.
    head, target = spec.head, spec.target
    if head is None:
        return repeats(tokens[None], first, target.vocab_size)[0]

    # 2. With a head: its first draft step at each position.
    drafted = next(KINDS[head.kind].rollout(head, target, tokens, features, 1), None)
    even = torch.full((1, target.vocab_size), 1 / target.vocab_size, device=tokens.device)
    if drafted is None:
        return even
    laws = probs(drafted[max(0, first - 1) :], params)
    return torch.cat([even, laws]) if first == 0 else laws


def repeats(tokens: Tensor, first: int, vocab_size: int) -> Tensor:
    """[B, T - first - 1, V] a law after each token from `first` on, for drafters without a model.

    A token's mass is proportional to the sum of three terms: how often it followed the same token
    before, its share of the text so far, and 1 / V. tokens: [B, T].
    """
    b, length = tokens.shape
    last = torch.arange(first, length - 1, device=tokens.device)
    before = torch.arange(length - 1, device=tokens.device) < last[:, None]  # [n, T - 1]
    weight = (tokens[:, last, None] == tokens[:, None, :-1]) + 1 / last[:, None].clamp(min=1)
    counts = torch.full((b, len(last), vocab_size), 1 / vocab_size, device=tokens.device)
    counts.scatter_add_(2, tokens[:, None, 1:].expand(weight.shape), weight * before)
    return counts / counts.sum(-1, keepdim=True)


def successive(numbers: Tensor) -> Tensor:
    """[n - 1, 2] the pairs of successive numbers [n]."""
    return numbers.unfold(0, 2, 1) if len(numbers) > 1 else numbers.new_empty(0, 2)


def successive_draws(cycles: Sequence[Cycle]) -> Tensor:
    """[m, 2] pairs of places of first draws.

    At successive nodes of a tree, and at the same node of successive trees of a text.
    """
    pairs = [successive(cycle.first) for cycle in cycles]
    for before, now in pairwise(cycles):
        both = min(len(before.first), len(now.first))
        pairs.append(torch.stack([before.first[:both], now.first[:both]], dim=1))
    return torch.cat(pairs) if pairs else torch.empty(0, 2, dtype=torch.float64)
