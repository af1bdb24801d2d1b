"""Logits to probabilities, one function for target, head and verifier, and all draws of a sequence.

`sample`, `sample_each`, `sample_events` and `sample_uniform` are the only places where a sequence's
generator is used: a test replaces them by an oracle that tries every outcome.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.sampling.params import SamplingParams as SamplingParams

TOPK_BLOCK = 64  # tokens a block, for the largest scores
ONE_PASS_NUMBERS = (
    1 << 17
)  # probabilities; up to here one pass finds the largest faster than blocks do


def to_float(logits: Tensor) -> Tensor:
    """The logits in float32; float64 ones stay."""
    if logits.dtype == torch.float64:
        return logits
    return logits.float()


def compute_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that is sampled: temperature, then top-k, top-p, min-p, each on the distribution before it.

    logits: [..., V] logits. Returns [..., V] probabilities, float64 for float64 logits, else
    float32. Subnormal probabilities become 0.
    """
    # 1. Greedy: one-hot.
    logits = to_float(logits)
    if params.greedy:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)

    # 2. Verifiers divide residuals of q by their sum. A subnormal sum has few digits and an
    # infinite reciprocal.
    p = filter_logits(logits, params).softmax(-1)
    return torch.threshold_(p, torch.finfo(p.dtype).tiny, 0.0)


def filter_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Log-probabilities up to a constant: temperature above 0, then top-k, top-p and min-p, each after the others.

    logits: [..., V] float32 or float64. Returns the same shape, -inf for tokens that are left out.
    """
    if params.temperature != 1:
        logits = logits / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        smallest = logits.topk(params.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    if params.top_p < 1:
        ascending, order = logits.sort(dim=-1)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - params.top_p
        drop[..., -1] = False
        logits = logits.masked_fill(torch.zeros_like(drop).scatter_(-1, order, drop), -math.inf)

    if params.min_p > 0:
        least = logits.amax(-1, keepdim=True) + math.log(params.min_p)
        logits = logits.masked_fill(logits < least, -math.inf)
    return logits


def choose_greedy(logits: Tensor) -> Tensor:
    """[N] int64 the most likely token of each row; V, which is no token, for NaN. logits: [N, V]."""
    if logits.numel() <= ONE_PASS_NUMBERS:
        values, indices = logits.max(-1, keepdim=True)
    else:
        values, indices = select_topk(logits, 1)
    return indices.masked_fill_(values.isnan(), logits.shape[-1]).squeeze(-1)


def select_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores of each row in descending order, and their columns; NaN counts as
    largest.

    scores: [..., V], k <= V. Returns [..., k] of float32 or float64, and [..., k] int64.
    They lie in the k blocks with the largest maxima; on a CPU, finding those is faster than `topk` over
    long rows. Elsewhere `topk` is one launch.
    """
    scores = to_float(scores)
    v = scores.shape[-1]
    if v < 4 * TOPK_BLOCK * k or scores.numel() <= ONE_PASS_NUMBERS or scores.device.type != "cpu":
        values, indices = scores.topk(k)
        return values, indices
    if v % TOPK_BLOCK:
        scores = pad(scores, (0, -v % TOPK_BLOCK), value=-math.inf)
    blocks = scores.unflatten(-1, (-1, TOPK_BLOCK))
    block = blocks.amax(-1).topk(k).indices  # [..., k]
    columns = block[..., None].expand(block.shape + (TOPK_BLOCK,))
    inside = blocks.gather(-2, columns).flatten(-2)
    values, place = inside.topk(k)
    return values, block.gather(-1, place // TOPK_BLOCK) * TOPK_BLOCK + place % TOPK_BLOCK


def sample(masses: Tensor, generator: torch.Generator) -> Tensor:
    """One token a row by inverting the cumulated masses, with one uniform a row; never a token of mass
    0.

    masses: [..., V] non-negative, any sum. Returns [...] int64; V for a row of zeros or with NaN.
    """
    uniform = sample_uniform(masses.shape[:-1] + (1,), generator, masses.device)
    return invert(masses, uniform).squeeze(-1)


def sample_each(masses: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """[B, number] independent tokens from each row of the masses [B, V]; V as in `sample`."""
    return invert(masses, sample_uniform((len(masses), number), generator, masses.device))


def sample_events(probability: Tensor, generator: torch.Generator) -> Tensor:
    """Bool of the same shape: independent events of these probabilities (float64)."""
    return sample_uniform(probability.shape, generator, probability.device) < probability


def sample_uniform(
    shape: Sequence[int], generator: torch.Generator, device: torch.device
) -> Tensor:
    """Independent float64 numbers, uniform in [0, 1)."""
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=device)


def invert(masses: Tensor, uniform: Tensor) -> Tensor:
    """The tokens at given shares of the cumulated masses, in float64.

    masses: [..., V]; uniform: [..., K] float64, shares of a row's mass. Returns [..., K] int64, V as
    in `sample`.
    """
    ends = masses.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(ends, uniform * ends[..., -1:], right=True)
