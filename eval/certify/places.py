"""Sampled texts as numbers, the places of tokens in the plain model's distribution, and questions about them.

Nothing comes from the verifier: p is that of the plain model's forward over the whole text. q only
orders the tokens. So any function of the text before a token serves; it need not be the
distribution that the draft used.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from treespec.api.spec import Spec
from treespec.draft.trained.kinds import KINDS
from treespec.eval.certify import statistics
from treespec.eval.certify.draws import Cycle, placed
from treespec.eval.certify.texts import Sample
from treespec.shaping.sampling import SamplingParams, probs

AT_ONCE = 1 << 23  # probabilities in one tensor
# A statistic: the p-value of numbers, and the smallest fault that n numbers find at an error.
Statistic = tuple[Callable[[Tensor], float], Callable[[int, float], float | None]]
GAP: Statistic = (statistics.uniform, statistics.least_gap)
PAIRS: Statistic = (statistics.independent, statistics.least_correlation)
BET: Statistic = (statistics.lost, lambda n, error: None)


@dataclass(frozen=True)
class Places:
    """The places of a text's tokens, numbers in [0, 1] (`placed`).

    by_ratio, by_p, by_number: [n] places in p, tokens ordered by p/q, by p, by number.
    rank: [n] places in q, tokens ordered by q.
    first: [c] by_number of the first token of each cycle.
    first_by_ratio: places of these tokens in p, ordered by p over the root's q; only of cycles
    whose root has draws.
    """

    by_ratio: Tensor
    by_p: Tensor
    by_number: Tensor
    rank: Tensor
    first: Tensor
    first_by_ratio: Tensor


@torch.no_grad()
def places(spec: Spec, samples: Sequence[Sample], **changes: Any) -> Iterator[Places]:
    """The places of texts. changes: options of `Spec.generate` that change the logits."""
    coins = torch.Generator().manual_seed(len(samples))
    longest = max(len(sample.output) for sample in samples)
    size = max(1, AT_ONCE // (longest * spec.target.vocab_size))
    for start in range(0, len(samples), size):
        # 1. One plain forward over several texts, padded on the right.
        some = samples[start : start + size]
        texts = [torch.tensor(sample.prompt + sample.output) for sample in some]
        rows = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(
            spec.target.output_device
        )
        taps = spec.head.taps if spec.head else ()
        features, last = spec.target.parted(spec.target.features(rows, taps, last=True), taps)
        for row, sample in enumerate(some):
            # 2. The distributions p and q [n, V] of each new token.
            first, end = len(sample.prompt) - 1, len(texts[row]) - 1
            logits = spec.target.output_logits(last[row, first:end])
            if changes:
                law = spec.request(sample.prompt, **changes).distribution
                logits = law.shape([tuple(sample.output[:n]) for n in range(end - first)], logits)
            p = probs(logits, sample.params)
            q = draft_law(
                spec, rows[row, : end + 1], features[row, : end + 1], first, sample.params
            )
            yield places_in(p, q, sample, coins)


def places_in(p: Tensor, q: Tensor, sample: Sample, coins: torch.Generator) -> Places:
    """The places of one text. p, q: [n, V] of its tokens."""

    def place(law: Tensor, order: Tensor, tokens: Tensor) -> Tensor:
        return placed(law, order, tokens[:, None], coins).squeeze(1).cpu()

    def ratio(p: Tensor, q: Tensor) -> Tensor:
        return p / q.clamp(min=torch.finfo(q.dtype).tiny)

    tokens = torch.tensor(sample.output, device=p.device)
    by_number = place(p, torch.arange(p.shape[1], device=p.device).expand_as(p), tokens)
    begins = starts(sample)
    drafted = [(at, cycle.root_law) for at, cycle in begins if cycle.root_law is not None]
    first_by_ratio = by_number[:0]
    if drafted:
        at = torch.tensor([at for at, _ in drafted], device=p.device)
        order = ratio(p[at], torch.stack([law for _, law in drafted]))
        first_by_ratio = place(p[at], order, tokens[at])
    return Places(
        place(p, ratio(p, q), tokens),
        place(p, p, tokens),
        by_number,
        place(q, q, tokens),
        by_number[[at for at, _ in begins]],
        first_by_ratio,
    )


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
    """[n, V] probabilities of each token behind position `first`: a head's first draft step, or `repeats`.

    Row t of a draft step is for token t + 2. For five tokens and first = 1:

        tokens         0  1 | 2  3  4        n = 3
        rows of q             0  1  2        row 0 is for token 2

    With first = 0 token 1 has no row; uniform probabilities stand for it.
    tokens: [T]. features: [T, F] the head's input.
    """
    head, target = spec.head, spec.target
    if head is None:
        return repeats(tokens[None], first, target.vocab_size)[0]
    drafted = next(KINDS[head.kind].rollout(head, target, tokens, features, 1), None)
    even = torch.full((1, target.vocab_size), 1 / target.vocab_size, device=tokens.device)
    if drafted is None:
        return even
    laws = probs(drafted[max(0, first - 1) :], params)
    return torch.cat([even, laws]) if first == 0 else laws


def repeats(tokens: Tensor, first: int, vocab_size: int) -> Tensor:
    """[B, T - first - 1, V] probabilities after each token from `first` on, for drafters without a model.

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


def questions(
    mine: Sequence[Places], ours: Sequence[Sample]
) -> list[tuple[str, Tensor, Statistic]]:
    """The name of each question, its numbers and its statistic.

    A question without numbers has no meaning for the scheme, and is left out. mine: places of the
    texts' tokens. ours: the texts.
    """
    cycles = [cycle for text in ours for cycle in text.cycles]
    asked = {
        "tokens follow the target's law, by p/q": (GAP, [text.by_ratio for text in mine]),
        "tokens follow the target's law, by p": (GAP, [text.by_p for text in mine]),
        "first tokens of cycles follow it, by p/q as told": (
            GAP,
            [text.first_by_ratio for text in mine],
        ),
        "draws follow the law that they are said to": (GAP, [cycle.draws for cycle in cycles]),
        "draws are not from a power of that law": (BET, [cycle.hotter for cycle in cycles]),
        "draws do not repeat them more often, or less": (BET, [cycle.rarer for cycle in cycles]),
        "tokens are independent of the token before": (
            PAIRS,
            [successive(text.by_number) for text in mine],
        ),
        "cycles are independent of the cycle before": (
            PAIRS,
            [successive(text.first) for text in mine],
        ),
        "draws are independent of the draws before": (
            PAIRS,
            [pair for text in ours for pair in successive_draws(text.cycles)],
        ),
    }
    joined = [(name, torch.cat(rows), by) for name, (by, rows) in asked.items() if rows]
    return [question for question in joined if len(question[1])]


def successive(numbers: Tensor) -> Tensor:
    """[n - 1, 2] the pairs of successive numbers [n]."""
    return torch.stack([numbers[:-1], numbers[1:]], dim=1)


def successive_draws(cycles: Sequence[Cycle]) -> Iterator[Tensor]:
    """[m, 2] pairs of places of first draws.

    At successive nodes of a tree, and at the same node of successive trees of a text.
    """
    yield from (successive(cycle.first) for cycle in cycles)
    for before, now in pairwise(cycle.first for cycle in cycles):
        both = min(len(before), len(now))
        yield torch.stack([before[:both], now[:both]], dim=1)
