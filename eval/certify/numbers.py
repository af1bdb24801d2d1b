"""Sampled texts as numbers: where each token stands in the law of the plain model, and in that of the draft.

Nothing that the verifier computed goes in: p is of the plain model's forward over the whole text. q serves as an order
alone, so it needs to be a function of what stands before the token, not the draft's very own law.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from treespec.draft.trained.kinds import KINDS
from treespec.eval.certify.witness import Cycle, placed
from treespec.sampling import SamplingParams, probs
from treespec.spec import Spec

AT_ONCE = 1 << 23  # probabilities that are held in one tensor


@dataclass(frozen=True)
class Sample:
    """A sampled text. group: number of its prompt and law. cycles: those of the verifier, none of a plain text."""

    group: int
    prompt: list[int]
    output: list[int]
    params: SamplingParams
    cycles: Sequence[Cycle] = field(default=())


@dataclass(frozen=True)
class Places:
    """A text's numbers in [0, 1]. Of its n tokens: by_ratio, by_p, by_number are the places in the plain law, ordered
    by p/q, by p and by the tokens' numbers; rank is the place in q, ordered by q. Of its cycles' first tokens, [c]:
    first is by_number, first_by_ratio is ordered by p over the q told at the root, where there is one.
    """

    by_ratio: Tensor
    by_p: Tensor
    by_number: Tensor
    rank: Tensor
    first: Tensor
    first_by_ratio: Tensor


@torch.no_grad()
def places(spec: Spec, samples: Sequence[Sample]) -> list[Places]:
    """The numbers of texts that were sampled by one law."""
    coins = torch.Generator().manual_seed(len(samples))
    longest = max(len(sample.output) for sample in samples)
    size = max(1, AT_ONCE // (longest * spec.target.vocab_size))
    return [
        found
        for start in range(0, len(samples), size)
        for found in _of(spec, samples[start : start + size], coins)
    ]


def _of(spec: Spec, samples: Sequence[Sample], coins: torch.Generator) -> Iterator[Places]:
    target, head = spec.target, spec.head
    # 1. One plain forward over the texts, filled up on the right.
    texts = [sample.prompt + sample.output for sample in samples]
    longest = max(map(len, texts))
    rows = torch.tensor([text + [0] * (longest - len(text)) for text in texts]).to(
        target.output_device
    )
    taps = head.taps if head else ()
    given, last = target.parted(target.features(rows, taps, last=True), taps)
    for row, (sample, tokens) in enumerate(zip(samples, texts, strict=True)):
        # 2. The laws p and q [n, V] of each new token, and the token [n, 1].
        first, end = len(sample.prompt) - 1, len(tokens) - 1
        p = probs(target.output_logits(last[row, first:end]), sample.params)
        q = draft_law(
            head, target, rows[row, : end + 1], given[row, : end + 1], first, sample.params
        )
        chosen = rows[row, first + 1 : end + 1, None]
        number = torch.arange(p.shape[1], device=p.device).expand_as(p)
        # 3. Their places.
        orders = (p / q.clamp(min=torch.finfo(q.dtype).tiny), p, number)
        by_ratio, by_p, by_number = (
            placed(p, order, chosen, coins).squeeze(1).cpu() for order in orders
        )
        rank = placed(q, q, chosen, coins).squeeze(1).cpu()
        begins = starts(sample)
        drafted = [(at, cycle.root_law) for at, cycle in begins if cycle.root_law is not None]
        first_by_ratio = by_p[:0]
        if drafted:
            at = torch.tensor([at for at, _ in drafted], device=p.device)
            told = torch.stack([law for _, law in drafted])
            order = p[at] / told.clamp(min=torch.finfo(told.dtype).tiny)
            first_by_ratio = placed(p[at], order, chosen[at], coins).squeeze(1).cpu()
        of_cycles = by_number[[at for at, _ in begins]]
        yield Places(by_ratio, by_p, by_number, rank, of_cycles, first_by_ratio)


def starts(sample: Sample) -> list[tuple[int, Cycle]]:
    """Which of the new tokens each cycle begins with; none where the text is not what the cycles say."""
    said = [token for cycle in sample.cycles for token in cycle.tokens]
    if said[: len(sample.output)] != sample.output:
        return []
    found, at = [], 0
    for cycle in sample.cycles:
        found.append((at, cycle))
        at += len(cycle.tokens)
    return [(at, cycle) for at, cycle in found if at < len(sample.output)]


def draft_law(
    head: Any, target: Any, tokens: Tensor, features: Tensor, first: int, params: SamplingParams
) -> Tensor:
    """[n, V] a law of each token behind `first`: a head's first draft step, without a head that of `repeats`.

    tokens: [T]. features: [T, F] what a head is given.
    """
    if head is None:
        return repeats(tokens[None], first, target.vocab_size)[0]
    # Row t drafts token t + 2: a token behind a single one has no row, and any law will do.
    drafted = next(KINDS[head.kind].rollout(head, target, tokens, features, 1), None)
    even = torch.full((1, target.vocab_size), 1 / target.vocab_size, device=tokens.device)
    if drafted is None:
        return even
    laws = probs(drafted[max(0, first - 1) :], params)
    return torch.cat([even, laws]) if first == 0 else laws


def repeats(tokens: Tensor, first: int, vocab_size: int) -> Tensor:
    """[B, T - first - 1, V] a law after each token from `first` on, as drafters without a model go by, more or less.

    tokens: [B, T]. It is proportional to how often a token followed the same one before, its share of the text so
    far, and 1 / V.
    """
    b, length = tokens.shape
    last = torch.arange(first, length - 1, device=tokens.device)
    before = torch.arange(length - 1, device=tokens.device) < last[:, None]  # [n, T - 1]
    weight = (tokens[:, last, None] == tokens[:, None, :-1]) + 1 / last[:, None].clamp(min=1)
    counts = torch.full((b, len(last), vocab_size), 1 / vocab_size, device=tokens.device)
    counts.scatter_add_(2, tokens[:, None, 1:].expand(weight.shape), weight * before)
    return counts / counts.sum(-1, keepdim=True)


def successive(numbers: Tensor) -> Tensor:
    """[n - 1, 2] each number [n] with the one before it."""
    return numbers.unfold(0, 2, 1) if len(numbers) > 1 else numbers.new_empty(0, 2)


def successive_draws(cycles: Sequence[Cycle]) -> Tensor:
    """[m, 2] the first draws at successive nodes of a tree, and at the same place of successive trees of a text."""
    pairs = [successive(cycle.first) for cycle in cycles]
    for before, now in pairwise(cycles):
        both = min(len(before.first), len(now.first))
        pairs.append(torch.stack([before.first[:both], now.first[:both]], dim=1))
    return torch.cat(pairs) if pairs else torch.empty(0, 2, dtype=torch.float64)
