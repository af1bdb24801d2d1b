"""Count distinct tokens among draws from a large vocabulary, for `treespec.eval.acceptance.drafted`.

Both counts, `count_rung_clocks` and `count_distinct`, are elementary symmetric polynomials e_j of one number for each
token. The most likely tokens are added one after another. All other tokens are added by their power sums, since

    j e_j = sum over i = 1 … j of (-1)^(i-1) e_(j-i) Y_i        Y_i: the sum of the i-th powers

and a power of e^x - 1 is a short series in x if x, which is q(token) times a number of draws, is small.
"""

from dataclasses import dataclass
from math import comb

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.verify.distributions import clamp_positive, mask_out

ORDER = 16  # number of terms of a series


@dataclass(frozen=True)
class Parted:
    """Masses [n, V], split into the M largest and all others.

    Attributes:
        tops: [n, M] the largest masses.
        total: [n, 1] the sum of the other masses.
        largest: [n, 1] the largest other mass.
        sums: [n, ORDER] power sums 1 … ORDER of the other masses, each divided by `largest`.
    """

    tops: Tensor
    total: Tensor
    largest: Tensor
    sums: Tensor


def split_masses(masses: Tensor, k: int) -> Parted:
    """Split masses [n, V] so that each other mass is small even after k draws: the 64 + 16 k largest are tops."""
    tops, tokens = masses.topk(min(64 + 16 * k, masses.shape[-1]))
    others = mask_out(masses, tokens)
    largest = others.amax(-1, keepdim=True)
    ratios = others / clamp_positive(largest)
    square = ratios * ratios
    low = torch.stack([torch.ones_like(ratios), ratios, square, square * ratios], 1)  # [n, 4, V]
    high = [ratios]  # of powers 1, 5, 9, 13
    for _ in range(ORDER // 4 - 1):
        high.append(high[-1] * square * square)
    sums = (torch.stack(high, 1) @ low.mT).flatten(1)
    return Parted(tops, others.sum(-1, keepdim=True), largest, sums)


def count_surjections(max_tokens: int) -> Tensor:
    """Count the ways to give 1 … ORDER draws to 1 … `max_tokens` tokens so that each token has a draw.

    Divided by the factorial of the number of draws they are the coefficients of (e^x - 1)^tokens.

        draws         1    2    3    4    5
        1 token       1    1    1    1    1
        2 tokens      0    2    6   14   30

    Returns:
        [max_tokens, ORDER] float64.
    """
    ways = torch.zeros(max_tokens + 1, ORDER + 1, dtype=torch.float64, device="cpu")
    ways[0, 0] = 1
    for draws in range(1, ORDER + 1):
        for tokens in range(1, max_tokens + 1):
            ways[tokens, draws] = tokens * (ways[tokens, draws - 1] + ways[tokens - 1, draws - 1])
    return ways[1:, 1:]


def count_rung_clocks(rates: Tensor, times: Tensor, k: int) -> Tensor:
    """Compute Pr(exactly j clocks have rung) at given times for each j < k; a clock rings after an exponential time.

    Args:
        rates: [n, V] rate of each clock.
        times: [n, T].
        k: number of counts.

    Returns:
        [n, T, k].
    """
    # 1. The fast clocks, one after another.
    parted = split_masses(rates, k)
    counts = pad(torch.ones_like(times)[..., None], (0, k - 1))
    for rate in parted.tops.T:
        expected_rings = (rate[:, None] * times)[..., None]
        counts = (
            counts * (-expected_rings).exp()
            - pad(counts[..., :-1], (1, 0)) * (-expected_rings).expm1()
        )

    # 2. The slow clocks: e_j of e^(rate t) - 1, times the probability that none of them has rung.
    powers = (parted.largest * times)[..., None] ** torch.arange(1, ORDER + 1, device=times.device)
    factorials = torch.arange(1, ORDER + 1, dtype=torch.float64, device=times.device).cumprod(0)
    series = (count_surjections(k - 1).to(times.device) / factorials).T  # [ORDER, k - 1]
    sums = (powers * parted.sums[:, None]) @ series  # [n, T, k - 1]
    symmetric = [torch.ones_like(times)]
    for j in range(1, k):
        terms = [(-1) ** (i - 1) * symmetric[j - i] * sums[..., i - 1] for i in range(1, j + 1)]
        symmetric.append(torch.stack(terms).sum(0) / j)
    slow = torch.stack(symmetric, -1) * (-parted.total * times).exp()[..., None]

    # 3. Convolve both counts.
    combined = []
    for j in range(k):
        combined.append((counts[..., : j + 1] * slow[..., : j + 1].flip(-1)).sum(-1))
    return torch.stack(combined, -1)


def find_distinct_chances(q: Tensor, y: Tensor, number: Tensor, k: int) -> Tensor:
    """Compute Pr(y is the i-th distinct token of independent draws) for each i < k.

    Args:
        q: [n, V] probabilities; a row sums to 1 or 0.
        y: [n, 1] int64.
        number: [n, 1] number of draws.
        k: number of distinct tokens that count.

    Returns:
        [n, k].
    """
    max_draws = max(1, int(number.max()))
    others_before = count_distinct(mask_out(q, y), max_draws - 1, k)  # [n, k, max_draws]
    is_drawn = torch.arange(max_draws, device=q.device) < number
    return q.gather(1, y) * (others_before * is_drawn[:, None]).sum(-1)


def count_distinct(q: Tensor, draws: int, k: int) -> Tensor:
    """Compute Pr(m independent draws all have their tokens in q, and exactly j distinct ones) for m <= draws, j < k.

    Args:
        q: [n, V] masses; a row sums to at most 1.
        draws: largest number of draws.
        k: number of counts.

    Returns:
        [n, k, draws + 1].
    """
    # 1. The likely tokens, one after another: l of m draws are the added token.
    parted = split_masses(q, k)
    lags = torch.arange(draws + 1, device=q.device)
    no_draws = (lags == 0).double().expand(len(q), 1, -1)
    counts = pad(no_draws, (0, 0, 0, k - 1))
    for mass in parted.tops.T:
        with_token = join_draws(counts[:, :-1], mass[:, None] ** lags * (lags > 0))
        counts = counts + pad(with_token, (0, 0, 1, 0))

    # 2. All other tokens: e_j by the number of draws.
    ways = pad(count_surjections(k).to(q.device), (1, max(0, draws - ORDER)))[:, : draws + 1]
    sums = pad(parted.sums, (1, max(0, draws - ORDER)))[:, : draws + 1] * parted.largest**lags
    symmetric = [no_draws]
    for j in range(1, k):
        terms = [
            (-1) ** (i - 1) * join_draws(symmetric[j - i], ways[i - 1] * sums)
            for i in range(1, j + 1)
        ]
        symmetric.append(torch.stack(terms).sum(0) / j)

    # 3. Convolve both counts.
    combined = torch.zeros_like(counts)
    for j, other_counts in enumerate(symmetric):
        combined[:, j:] += join_draws(counts[:, : k - j], other_counts.squeeze(1))
    return combined


def join_draws(counts: Tensor, other_counts: Tensor) -> Tensor:
    """Convolve counts of disjoint token sets: the sum over l of (m choose l) other_counts_l counts_(m-l), m < M.

    counts: [n, j, M] by number of draws. other_counts: [n, M]. Returns [n, j, M].
    """
    size = other_counts.shape[-1]
    choices = [[0.0] * size for _ in range(size)]
    for n in range(size):
        for m in range(n, size):
            choices[n][m] = float(comb(m, m - n))
    lags = torch.arange(size, device=other_counts.device)
    lags = (lags - lags[:, None]).clamp(min=0)  # [m - l, m]
    return counts @ (
        other_counts[:, lags]
        * torch.tensor(choices, dtype=torch.float32, device=other_counts.device).to(
            other_counts.dtype
        )
    )
