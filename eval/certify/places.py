"""Samples as numbers, the places of tokens in the plain model's distribution, and questions about them.

Nothing comes from the verifier: p is that of the plain model's forward over the whole sequence. q
only orders the tokens. So any function of the tokens before serves; it need not be the distribution
that the draft used.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from treespec.api.spec import Spec
from treespec.draft.trained.kinds import rollout
from treespec.eval.certify import statistics
from treespec.eval.certify.draws import Cycle, placed
from treespec.eval.certify.samples import Sample
from treespec.shaping.sampling import SamplingParams, probs

AT_ONCE = 1 << 23  # probabilities in one tensor
# A statistic: the p-value of numbers, and the smallest fault that n numbers find at an error.
Statistic = tuple[Callable[[Tensor], float], Callable[[int, float], float | None]]
GAP: Statistic = (statistics.uniform, statistics.least_gap)
PAIRS: Statistic = (statistics.independent, statistics.least_correlation)
BET: Statistic = (statistics.lost, lambda n, error: None)


@dataclass(frozen=True)
class Places:
    """The places of a sequence's tokens, numbers in [0, 1] (`placed`).

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
    """The places of sequences. changes: options of `Spec.generate` that change the logits."""
    coins, target = torch.Generator().manual_seed(len(samples)), spec.target
    longest = max(len(sample.output) for sample in samples)
    size = max(1, AT_ONCE // (longest * target.vocab_size))
    layers = spec.head.aux_layers if spec.head else ()
    for start in range(0, len(samples), size):
        # 1. One plain forward over several sequences, padded on the right.
        some = samples[start : start + size]
        whole = [torch.tensor(sample.prompt + sample.output) for sample in some]
        rows = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True).to(target.output_device)
        features, last = target.parted(target.features(rows, layers, last=True), layers)
        for row, sample in enumerate(some):
            # 2. The distributions p and q [n, V] of each new token.
            first, length = len(sample.prompt) - 1, len(whole[row])
            logits = target.output_logits(last[row, first : length - 1])
            if changes:
                paths = [tuple(sample.output[:n]) for n in range(len(logits))]
                logits = spec.request(sample.prompt, **changes).distribution.shape(paths, logits)
            p = probs(logits, sample.params)
            inputs = rows[row, :length], features[row, :length]
            yield places_in(p, q_of(spec, *inputs, first, sample.params), sample, coins)


def places_in(p: Tensor, q: Tensor, sample: Sample, coins: torch.Generator) -> Places:
    """The places of one sequence. p, q: [n, V] of its tokens."""

    def ratio(p: Tensor, q: Tensor) -> Tensor:
        return p / q.clamp(min=torch.finfo(q.dtype).tiny)

    tokens = torch.tensor(sample.output, device=p.device)
    by_number = placed(p, torch.arange(p.shape[1], device=p.device).expand_as(p), tokens, coins)
    begins = starts(sample)
    drafted = {at: cycle.root_q for at, cycle in begins if cycle.root_q is not None}
    at, first_by_ratio = [*drafted], by_number[:0]
    if drafted:
        order = ratio(p[at], torch.stack([*drafted.values()]))
        first_by_ratio = placed(p[at], order, tokens[at], coins)
    return Places(
        placed(p, ratio(p, q), tokens, coins),
        placed(p, p, tokens, coins),
        by_number,
        placed(q, q, tokens, coins),
        by_number[[at for at, _ in begins]],
        first_by_ratio,
    )


def starts(sample: Sample) -> list[tuple[int, Cycle]]:
    """Where in the output each cycle begins.

    Two cycles of three and two tokens, of which the output keeps the first four, begin at 0 and 3:

        cycles    a b c | d e         output    a b c d
    """
    lengths = [len(cycle.tokens) for cycle in sample.cycles]
    return list(zip(accumulate([0, *lengths]), sample.cycles, strict=False))


def q_of(
    spec: Spec, tokens: Tensor, features: Tensor, first: int, params: SamplingParams
) -> Tensor:
    """[n, V] probabilities of each token after position `first`: a head's first draft step, or `repeats`.

    Row t of a draft step is for token t + 2. For five tokens and first = 1:

        tokens         0  1 | 2  3  4        n = 3
        rows of q             0  1  2        row 0 is for token 2

    With first = 0 token 1 has no row; uniform probabilities stand for it.
    tokens: [T]. features: [T, F] the head's input.
    """
    head, target = spec.head, spec.target
    if head is None:
        return repeats(tokens, first, target.vocab_size)
    drafted = next(rollout(head, target, tokens, features, 1), None)
    even = torch.full((1, target.vocab_size), 1 / target.vocab_size, device=tokens.device)
    if drafted is None:
        return even
    q = probs(drafted[max(0, first - 1) :], params)
    return torch.cat([even, q]) if first == 0 else q


def repeats(tokens: Tensor, first: int, vocab_size: int) -> Tensor:
    """[T - first - 1, V] probabilities after each token from `first` on, for drafters without a model.

    A token's mass is proportional to the sum of three terms: how often it followed the same token
    before, its share of the sequence so far, and 1 / V. tokens: [T].
    """
    last = torch.arange(first, len(tokens) - 1, device=tokens.device)[:, None]
    before = torch.arange(len(tokens) - 1, device=tokens.device) < last  # [n, T - 1]
    weight = (tokens[last] == tokens[:-1]) + 1 / last.clamp(min=1)
    counts = torch.full((len(last), vocab_size), 1 / vocab_size, device=tokens.device)
    counts.scatter_add_(1, tokens[1:].expand(weight.shape), weight * before)
    return counts / counts.sum(-1, keepdim=True)


def questions(
    mine: Sequence[Places], ours: Sequence[Sample]
) -> list[tuple[str, Tensor, Statistic]]:
    """The name of each question, its numbers and its statistic.

    A question without numbers has no meaning for the scheme, and is left out. mine: places of the
    sequences' tokens. ours: the sequences.
    """
    cycles = [cycle for sample in ours for cycle in sample.cycles]
    successive_draws = [pair for sample in ours for pair in draw_pairs(sample.cycles)]
    asked: list[tuple[str, Statistic, list[Tensor]]] = [
        ("tokens follow the target's distribution, by p/q", GAP, [x.by_ratio for x in mine]),
        ("tokens follow the target's distribution, by p", GAP, [x.by_p for x in mine]),
        (
            "first tokens of cycles follow it, by p over the reported q",
            GAP,
            [x.first_by_ratio for x in mine],
        ),
        ("draws follow their reported distribution", GAP, [cycle.draws for cycle in cycles]),
        ("draws are not from a power of it", BET, [cycle.hotter for cycle in cycles]),
        ("draws do not repeat them more often, or less", BET, [cycle.rarer for cycle in cycles]),
        (
            "tokens are independent of the token before",
            PAIRS,
            [successive(x.by_number) for x in mine],
        ),
        ("cycles are independent of the cycle before", PAIRS, [successive(x.first) for x in mine]),
        ("draws are independent of the draws before", PAIRS, successive_draws),
    ]
    joined = [(name, torch.cat(rows), by) for name, by, rows in asked if rows]
    return [question for question in joined if len(question[1])]


def successive(numbers: Tensor) -> Tensor:
    """[n - 1, 2] the pairs of successive numbers [n]."""
    return torch.stack([numbers[:-1], numbers[1:]], dim=1)


def draw_pairs(cycles: Sequence[Cycle]) -> Iterator[Tensor]:
    """[m, 2] pairs of places of first draws.

    At successive nodes of a tree, and at the same node of successive trees of a sequence.
    """
    yield from (successive(cycle.first) for cycle in cycles)
    for before, now in pairwise(cycle.first for cycle in cycles):
        both = min(len(before), len(now))
        yield torch.stack([before[:both], now[:both]], dim=1)
