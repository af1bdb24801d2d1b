"""From logits to probabilities, by one function for target, head and verifier; and all sampling.

A request's generator is used only in `sample`, `sample_each`, `sample_events` and `sample_uniform`, so a
test can replace them by an oracle that tries every outcome.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.sampling.params import SamplingParams as SamplingParams

TOPK_BLOCK = 64  # tokens in a block of `select_topk`
ONE_PASS_NUMBERS = 1 << 17  # up to this size one pass finds the largest score faster than blocks do


def to_float(logits: Tensor) -> Tensor:
    """Convert logits to float32; float64 ones stay as they are."""
    if logits.dtype == torch.float64:
        return logits
    return logits.float()


def compute_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Compute the distribution that is sampled: temperature, then top-k, top-p and min-p, one after the other.

    logits: [..., V]. Returns [..., V] probabilities, float64 for float64 logits, otherwise float32.
    Subnormal probabilities become 0.
    """
    # 1. Greedy: one-hot.
    logits = to_float(logits)
    if params.greedy:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)

    # 2. Subnormal probabilities become 0, because verifiers divide residuals by their sum: a subnormal
    # sum has few digits and an infinite reciprocal.
    p = filter_logits(logits, params).softmax(-1)
    return torch.threshold_(p, torch.finfo(p.dtype).tiny, 0.0)


def filter_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Apply temperature, then top-k, top-p and min-p. The result is log-probabilities up to a constant.

    logits: [..., V] float32 or float64. params: with a temperature above 0. Returns the same shape, -inf
    for tokens that are filtered out.
    """
    if params.temperature != 1:
        logits = logits / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        kth_largest = logits.topk(params.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < kth_largest, -math.inf)
    if params.top_p < 1:
        ascending, order = logits.sort(dim=-1)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - params.top_p
        drop[..., -1] = False
        logits = logits.masked_fill(torch.zeros_like(drop).scatter_(-1, order, drop), -math.inf)

    if params.min_p > 0:
        threshold = logits.amax(-1, keepdim=True) + math.log(params.min_p)
        logits = logits.masked_fill(logits < threshold, -math.inf)
    return logits


def choose_greedy(logits: Tensor) -> Tensor:
    """Find the most likely token of each row of logits [N, V]. Returns [N] int64; V, no token, for NaN."""
    if logits.numel() <= ONE_PASS_NUMBERS:
        values, indices = logits.max(-1, keepdim=True)
    else:
        values, indices = select_topk(logits, 1)
    return indices.masked_fill_(values.isnan(), logits.shape[-1]).squeeze(-1)


def choose_greedy_token(logits: Tensor) -> int:
    """Find the most likely token of one row of logits [V] on a CPU: of equal ones the first; V, no token, for NaN.

    As `choose_greedy`, whose operations cost more than the search in one row.
    """
    scores = to_float(logits).numpy()
    token = int(scores.argmax())  # the first NaN, if there is one
    if math.isnan(scores[token]):
        return len(scores)
    return token


def select_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find the k largest scores of each row in descending order, and their columns. NaN counts as largest.

    On a CPU, `torch.topk` over long rows is slow. The k largest scores are in the k blocks with the largest
    maxima, so only these blocks are searched. On other devices `torch.topk` is one launch.

    scores: [..., V], with k <= V. Returns [..., k] scores, float32 or float64, and [..., k] int64.
    """
    scores = to_float(scores)
    v = scores.shape[-1]
    if v < 4 * TOPK_BLOCK * k or scores.numel() <= ONE_PASS_NUMBERS or scores.device.type != "cpu":
        values, indices = scores.topk(k)
        return values, indices
    if v % TOPK_BLOCK:
        scores = pad(scores, (0, -v % TOPK_BLOCK), value=-math.inf)
    blocks = scores.unflatten(-1, (-1, TOPK_BLOCK))
    best_blocks = blocks.amax(-1).topk(k).indices  # [..., k]
    block_index = best_blocks[..., None].expand(best_blocks.shape + (TOPK_BLOCK,))
    candidates = blocks.gather(-2, block_index).flatten(-2)  # [..., k * TOPK_BLOCK]
    values, columns = candidates.topk(k)
    blocks_of_best = best_blocks.gather(-1, columns // TOPK_BLOCK)
    return values, blocks_of_best * TOPK_BLOCK + columns % TOPK_BLOCK


def sample(masses: Tensor, generator: torch.Generator) -> Tensor:
    """Sample one token from each row, with one uniform number a row. A token of mass 0 is never sampled.

    masses: [..., V] non-negative numbers of any sum. Returns [...] int64; V for a row of zeros or with NaN.
    """
    uniform = sample_uniform(masses.shape[:-1] + (1,), generator, masses.device)
    return invert(masses, uniform).squeeze(-1)


def sample_each(masses: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Sample [B, number] independent tokens, `number` from each row of the masses [B, V]; V as in `sample`."""
    return invert(masses, sample_uniform((len(masses), number), generator, masses.device))


def sample_events(probability: Tensor, generator: torch.Generator) -> Tensor:
    """Sample independent events of these float64 probabilities. Returns bool of the same shape."""
    return sample_uniform(probability.shape, generator, probability.device) < probability


def sample_uniform(
    shape: Sequence[int], generator: torch.Generator, device: torch.device
) -> Tensor:
    """Sample independent float64 numbers, uniform in [0, 1)."""
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=device)


def invert(masses: Tensor, uniform: Tensor) -> Tensor:
    """Find the tokens at which the cumulated masses reach given shares of their sum.

    masses: [..., V]. uniform: [..., K] float64 shares. Returns [..., K] int64; V as in `sample`.
    """
    ends = masses.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(ends, uniform * ends[..., -1:], right=True)
