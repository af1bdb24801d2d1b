"""Samples as numbers, the places of tokens in the plain model's distribution, and questions about them.

Nothing comes from the verifier: p is that of the plain model's forward over the whole sequence. q
only orders the tokens. So any function of the tokens before serves; it need not be the distribution
that the draft used.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treespec.api.spec import Spec
from treespec.draft.heads.loading import roll_out_drafts
from treespec.eval.certify import statistics
from treespec.eval.certify.draws import (
    DRAWS_QUESTION,
    POWER_QUESTION,
    REPEATS_QUESTION,
    place_tokens,
)
from treespec.eval.certify.samples import Sample
from treespec.sampling.probs import SamplingParams, compute_probs

MAX_TENSOR_PROBABILITIES = 1 << 23  # probabilities in one tensor


class Statistic(NamedTuple):
    """A test's statistic: the p-value of numbers, and the smallest fault that n numbers find at an error."""

    p_value: Callable[[Tensor], float]
    least_fault: Callable[[int, float], float | None]


UNIFORMITY_TEST = Statistic(statistics.compute_uniform_p_value, statistics.find_least_gap)
INDEPENDENCE_TEST = Statistic(
    statistics.compute_independence_p_value, statistics.find_least_correlation
)
BETTING_TEST = Statistic(statistics.compute_bet_p_value, lambda n, error: None)

BY_RATIO = "tokens follow the target's distribution, by p/q"
BY_P = "tokens follow the target's distribution, by p"
FIRST_TOKENS_QUESTION = "first tokens of cycles follow it, by p over the reported q"
TOKENS_QUESTION = "tokens are independent of the token before"
CYCLES_QUESTION = "cycles are independent of the cycle before"
PATHS_QUESTION = "draws are independent of the draws before"
TESTS_BY_QUESTION = {
    **dict.fromkeys((BY_RATIO, BY_P, FIRST_TOKENS_QUESTION, DRAWS_QUESTION), UNIFORMITY_TEST),
    **dict.fromkeys((POWER_QUESTION, REPEATS_QUESTION), BETTING_TEST),
    **dict.fromkeys((TOKENS_QUESTION, CYCLES_QUESTION, PATHS_QUESTION), INDEPENDENCE_TEST),
}
RANK_QUESTION = "samples look like model.generate's, by the draft's rank"
ALIKE_QUESTION = "samples look like plain ones, by p"


@torch.no_grad()
def iterate_sequence_ranks(
    spec: Spec, samples: Sequence[Sample], **changes: Any
) -> Iterator[dict[str, Tensor]]:
    """Yield the numbers of each sample by question. changes: options of `Spec.generate` that change the logits."""
    coins = torch.Generator().manual_seed(len(samples))
    target = spec.target
    longest = max(len(sample.output) for sample in samples)
    size = max(1, MAX_TENSOR_PROBABILITIES // (longest * target.vocab_size))
    layers = spec.head.aux_layers if spec.head else ()
    for start in range(0, len(samples), size):
        # 1. One plain forward over several sequences, padded on the right.
        some = samples[start : start + size]
        sequences = [torch.tensor(sample.prompt + sample.output) for sample in some]
        rows = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True).to(target.output_device)
        features, last = target.split_features(
            target.compute_features(rows, layers, last=True), layers
        )
        for row, sample in enumerate(some):
            # 2. The distributions p and q [n, V] of each new token.
            first = len(sample.prompt) - 1
            length = len(sequences[row])
            logits = target.compute_output_logits(last[row, first : length - 1])
            if changes:
                paths = [tuple(sample.output[:n]) for n in range(len(logits))]
                logits = spec.request(sample.prompt, **changes).sampler.process_logits(
                    paths, logits
                )
            p = compute_probs(logits, sample.params)
            q = draft_probabilities(
                spec, rows[row, :length], features[row, :length], first, sample.params
            )
            yield compute_sequence_ranks(p, q, sample, coins)


def compute_sequence_ranks(
    p: Tensor, q: Tensor, sample: Sample, coins: torch.Generator
) -> dict[str, Tensor]:
    """Compute the numbers of one sequence by question; `RANK_QUESTION`: [n] places in q, tokens ordered by q.

    Cycles of three and two tokens, of which the output keeps the first four, begin at 0 and 3:

        cycles    a b c | d e         output    a b c d

    p, q: [n, V] of its tokens.
    """
    # 1. Places of the tokens in p, ordered by p/q, by p and by number.
    tokens = torch.tensor(sample.output, device=p.device)
    cycles = sample.cycles
    ratio = p / q.clamp(min=torch.finfo(q.dtype).tiny)
    by_token = torch.arange(p.shape[1])
    by_number = place_tokens(p, by_token.to(p.device).expand_as(p), tokens, coins)
    lengths = [len(cycle.tokens) for cycle in cycles[:-1]]
    begins = list(accumulate(lengths, initial=0))
    numbers = {
        BY_RATIO: place_tokens(p, ratio, tokens, coins),
        BY_P: place_tokens(p, p, tokens, coins),
        RANK_QUESTION: place_tokens(q, q, tokens, coins),
        TOKENS_QUESTION: match_successive(by_number),
    }
    if not cycles:
        return numbers

    # 2. Of the first tokens of cycles, ordered by number, and by p over the root's q.
    numbers[CYCLES_QUESTION] = match_successive(by_number[begins])
    drafted_at = []
    root_qs = []
    for begin, cycle in zip(begins, cycles, strict=True):
        if cycle.root_q is not None:
            drafted_at.append(begin)
            root_qs.append(cycle.root_q)
    if drafted_at:
        roots = torch.stack(root_qs)
        order = p[drafted_at] / roots.clamp(min=torch.finfo(roots.dtype).tiny)
        numbers[FIRST_TOKENS_QUESTION] = place_tokens(
            p[drafted_at], order, tokens[drafted_at], coins
        )

    # 3. Of draws; those of first draws at successive nodes, and at the same node of successive trees.
    for name in (DRAWS_QUESTION, POWER_QUESTION, REPEATS_QUESTION):
        parts = [cycle.numbers[name] for cycle in cycles if name in cycle.numbers]
        if parts:
            numbers[name] = torch.cat(parts)
    pairs = [match_successive(cycle.first) for cycle in cycles]
    for cycle, following in pairwise(cycles):
        pairs.append(match_common(cycle.first, following.first))
    numbers[PATHS_QUESTION] = torch.cat(pairs)
    return numbers


def draft_probabilities(
    spec: Spec, tokens: Tensor, features: Tensor, first: int, params: SamplingParams
) -> Tensor:
    """Probabilities [n, V] of each token after position `first`, by a head's first draft step, else `repeats`.

    Row t of a draft step is for token t + 2. For five tokens and first = 1:

        tokens         0  1 | 2  3  4        n = 3
        rows of q             0  1  2        row 0 is for token 2

    With first = 0 token 1 has no row; uniform probabilities stand for it.
    tokens: [T]. features: [T, F] the head's input.
    """
    head = spec.head
    target = spec.target
    if head is None:
        return predict_repeats(tokens, first, target.vocab_size)
    drafted = next(roll_out_drafts(head, target, tokens, features, 1), None)
    even = torch.full((1, target.vocab_size), 1 / target.vocab_size, device=tokens.device)
    if drafted is None:
        return even
    q = compute_probs(drafted[max(0, first - 1) :], params)
    return torch.cat([even, q]) if first == 0 else q


def predict_repeats(tokens: Tensor, first: int, vocab_size: int) -> Tensor:
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


def match_successive(numbers: Tensor) -> Tensor:
    """[n - 1, 2] the pairs of successive numbers [n]."""
    return match_common(numbers[:-1], numbers[1:])


def match_common(before: Tensor, now: Tensor) -> Tensor:
    """[n, 2] pairs of the numbers that both have."""
    both = min(len(before), len(now))
    return torch.stack([before[:both], now[:both]], dim=1)
