"""Convert samples to test statistics: the ranks of their tokens in the plain model's distribution.

The verifier has no part in this: p is computed by a plain forward over the whole sequence. q only orders the tokens,
so it may be any function of the earlier tokens; it need not be the distribution that the draft used.
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

MAX_TENSOR_PROBABILITIES = 1 << 23  # largest number of probabilities in one tensor


class Statistic(NamedTuple):
    """A statistical test.

    Attributes:
        p_value: computes the p-value of the statistics.
        least_fault: computes the smallest fault that n statistics find at a given error; None if that is not known.
    """

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
    """Yield the statistics of each sample by test name. changes: options of `Spec.generate` that change the logits."""
    coins = torch.Generator().manual_seed(len(samples))
    target = spec.target
    longest = max(len(sample.output) for sample in samples)
    chunk_size = max(1, MAX_TENSOR_PROBABILITIES // (longest * target.vocab_size))
    layers = spec.head.aux_layers if spec.head else ()
    for start in range(0, len(samples), chunk_size):
        # 1. One plain forward over a chunk of sequences, padded on the right.
        chunk = samples[start : start + chunk_size]
        sequences = [
            torch.tensor(sample.prompt + sample.output, dtype=torch.int64, device="cpu")
            for sample in chunk
        ]
        rows = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True).to(target.output_device)
        features, last = target.split_features(
            target.compute_features(rows, layers, last=True), layers
        )
        for row, sample in enumerate(chunk):
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
    """Compute the statistics of one sequence by test name.

    Cycles of three and two tokens begin at positions 0 and 3. The output was cut after four tokens:

        cycles    a b c | d e         output    a b c d

    Args:
        p: [n, V] the target's probabilities of the output's n tokens.
        q: [n, V] draft probabilities of the same.
        sample: the sequence and its cycles.
        coins: generator of the ranks' random part.

    Returns:
        The ranks and bets of each test. `RANK_QUESTION`: [n] ranks in q, tokens ordered by q.
    """
    # 1. The ranks of the tokens in p, ordered by p/q, by p and by token id.
    tokens = torch.tensor(sample.output, dtype=torch.int64, device=p.device)
    cycles = sample.cycles
    ratio = p / q.clamp(min=torch.finfo(q.dtype).tiny)
    by_token = torch.arange(p.shape[1], device="cpu")
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

    # 2. The ranks of the cycles' first tokens, ordered by token id, and by p over the root's q.
    numbers[CYCLES_QUESTION] = match_successive(by_number[begins])
    drafted_begins = []
    root_qs = []
    for begin, cycle in zip(begins, cycles, strict=True):
        if cycle.root_q is not None:
            drafted_begins.append(begin)
            root_qs.append(cycle.root_q)
    if drafted_begins:
        roots = torch.stack(root_qs)
        order = p[drafted_begins] / roots.clamp(min=torch.finfo(roots.dtype).tiny)
        numbers[FIRST_TOKENS_QUESTION] = place_tokens(
            p[drafted_begins], order, tokens[drafted_begins], coins
        )

    # 3. The draws' statistics; pairs of first draws at successive nodes, and at the same node of successive trees.
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
    """Compute draft probabilities [n, V] of each token after position `first`.

    They come from a head's first draft step; without a head from `predict_repeats`. Row t of a draft step is for token
    t + 2. For five tokens and first = 1:

        tokens         0  1 | 2  3  4        n = 3
        rows of q             0  1  2        row 0 is for token 2

    With first = 0 token 1 has no row, so its probabilities are uniform.

    Args:
        spec: the target, and the head if there is one.
        tokens: [T] int64.
        features: [T, F] the head's input.
        first: position before the first token to predict.
        params: temperature and truncation.
    """
    head = spec.head
    target = spec.target
    if head is None:
        return predict_repeats(tokens, first, target.vocab_size)
    draft_logits = next(roll_out_drafts(head, target, tokens, features, 1), None)
    uniform = torch.full(
        (1, target.vocab_size), 1 / target.vocab_size, dtype=torch.float32, device=tokens.device
    )
    if draft_logits is None:
        return uniform
    q = compute_probs(draft_logits[max(0, first - 1) :], params)
    return torch.cat([uniform, q]) if first == 0 else q


def predict_repeats(tokens: Tensor, first: int, vocab_size: int) -> Tensor:
    """Compute probabilities [T - first - 1, V] of each token after position `first`, for drafters without a head.

    A token's mass is proportional to the sum of three terms: how often it has followed the same token, its share of
    the sequence so far, and 1 / V. tokens: [T] int64.
    """
    positions = torch.arange(first, len(tokens) - 1, device=tokens.device)[:, None]
    is_before = torch.arange(len(tokens) - 1, device=tokens.device) < positions  # [n, T - 1]
    weight = (tokens[positions] == tokens[:-1]) + 1 / positions.clamp(min=1).float()
    counts = torch.full(
        (len(positions), vocab_size), 1 / vocab_size, dtype=torch.float32, device=tokens.device
    )
    counts.scatter_add_(1, tokens[1:].expand(weight.shape), weight * is_before)
    return counts / counts.sum(-1, keepdim=True)


def match_successive(numbers: Tensor) -> Tensor:
    """Pair successive numbers [n]; [n - 1, 2]."""
    return match_common(numbers[:-1], numbers[1:])


def match_common(earlier: Tensor, later: Tensor) -> Tensor:
    """Pair the numbers at equal indices, as far as both have them; [n, 2]."""
    length = min(len(earlier), len(later))
    return torch.stack([earlier[:length], later[:length]], dim=1)
