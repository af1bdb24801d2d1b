"""How many of many unlikely tokens have come: the counting behind `treespec.eval.acceptance.drafted`.

Both counts are elementary symmetric polynomials e_j of one number for each token. The most likely tokens are added one
after another. All others come in by their power sums, since

    j e_j = sum over i = 1 … j of (-1)^(i-1) e_(j-i) Y_i        Y_i: the sum of the i-th powers

and a power of e^x - 1 is a short series in x where x, q(token) times a number of draws, is small.
"""

from dataclasses import dataclass
from math import comb

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.verify.distributions import clamp_positive, mask_out

ORDER = 16  # terms of a series


@dataclass(frozen=True)
class Parted:
    """Masses [n, V] in two parts.

    tops: [n, M] the largest masses. total: [n, 1] the sum of the others. largest: [n, 1] the largest of the others.
    sums: [n, ORDER] the sums of the powers 1 … of the others over the largest of them.
    """

    tops: Tensor
    total: Tensor
    largest: Tensor
    sums: Tensor


def split_masses(masses: Tensor, k: int) -> Parted:
    """The masses [n, V] so parted that k draws come from the others rarely, each."""
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


def count_surjections(most: int) -> Tensor:
    """[most, ORDER] float64: ways to give 1 … ORDER draws to 1 … `most` tokens so that each has one.

    Over the factorial of the draws they are the coefficients of (e^x - 1)^tokens.
    """
    ways = torch.zeros(most + 1, ORDER + 1, dtype=torch.float64)
    ways[0, 0] = 1
    for draws in range(1, ORDER + 1):
        for tokens in range(1, most + 1):
            ways[tokens, draws] = tokens * (ways[tokens, draws - 1] + ways[tokens - 1, draws - 1])
    return ways[1:, 1:]


def count_rung_clocks(rates: Tensor, times: Tensor, k: int) -> Tensor:
    """[n, T, k] Pr(j clocks have rung) for j < k. Clocks ring after exponential times.

    rates: [n, V]. times: [n, T].
    """
    # 1. The fast clocks, one after another.
    parted = split_masses(rates, k)
    counts = pad(torch.ones_like(times)[..., None], (0, k - 1))
    for rate in parted.tops.T:
        due = (rate[:, None] * times)[..., None]
        counts = counts * (-due).exp() - pad(counts[..., :-1], (1, 0)) * (-due).expm1()

    # 2. The slow ones: e_j of e^(rate t) - 1, times the chance that none has rung.
    powers = (parted.largest * times)[..., None] ** torch.arange(1, ORDER + 1, device=times.device)
    factorials = torch.arange(1, ORDER + 1, dtype=torch.float64, device=times.device).cumprod(0)
    series = (count_surjections(k - 1).to(times.device) / factorials).T  # [ORDER, k - 1]
    sums = (powers * parted.sums[:, None]) @ series  # [n, T, k - 1]
    symmetric = [torch.ones_like(times)]
    for j in range(1, k):
        terms = [(-1) ** (i - 1) * symmetric[j - i] * sums[..., i - 1] for i in range(1, j + 1)]
        symmetric.append(torch.stack(terms).sum(0) / j)
    slow = torch.stack(symmetric, -1) * (-parted.total * times).exp()[..., None]

    # 3. Together.
    both = []
    for j in range(k):
        both.append((counts[..., : j + 1] * slow[..., : j + 1].flip(-1)).sum(-1))
    return torch.stack(both, -1)


def find_distinct_chances(q: Tensor, y: Tensor, number: Tensor, k: int) -> Tensor:
    """[n, k] Pr(y is the i-th distinct token of independent draws).

    q: [n, V], of sum 1 or 0. y: [n, 1]. number: [n, 1] how many draws are made.
    """
    most = max(1, int(number.max()))
    before = count_distinct(mask_out(q, y), most - 1, k)  # [n, k, most]
    is_drawn = torch.arange(most, device=q.device) < number
    return q.gather(1, y) * (before * is_drawn[:, None]).sum(-1)


def count_distinct(q: Tensor, draws: int, k: int) -> Tensor:
    """[n, k, draws + 1] Pr(0 … `draws` independent draws are of exactly j < k tokens, all of them of q).

    q: [n, V], of sum 1 at most.
    """
    # 1. The likely tokens, one after another: l of m draws are such a token.
    parted = split_masses(q, k)
    lags = torch.arange(draws + 1, device=q.device)
    none = (lags == 0).double().expand(len(q), 1, -1)
    counts = pad(none, (0, 0, 0, k - 1))
    for mass in parted.tops.T:
        more = join_draws(counts[:, :-1], mass[:, None] ** lags * (lags > 0))
        counts = counts + pad(more, (0, 0, 1, 0))

    # 2. The others: e_j by the number of draws.
    ways = pad(count_surjections(k).to(q.device), (1, max(0, draws - ORDER)))[:, : draws + 1]
    sums = pad(parted.sums, (1, max(0, draws - ORDER)))[:, : draws + 1] * parted.largest**lags
    symmetric = [none]
    for j in range(1, k):
        terms = [
            (-1) ** (i - 1) * join_draws(symmetric[j - i], ways[i - 1] * sums)
            for i in range(1, j + 1)
        ]
        symmetric.append(torch.stack(terms).sum(0) / j)

    # 3. Together.
    both = torch.zeros_like(counts)
    for j, others in enumerate(symmetric):
        both[:, j:] += join_draws(counts[:, : k - j], others.squeeze(1))
    return both


def join_draws(some: Tensor, others: Tensor) -> Tensor:
    """[n, j, M] the sum over l of (m over l) others_l some_(m-l), for m = 0 … M - 1. others: [n, M]."""
    size = others.shape[-1]
    choices = [[0.0] * size for _ in range(size)]
    for n in range(size):
        for m in range(n, size):
            choices[n][m] = float(comb(m, m - n))
    lags = torch.arange(size, device=others.device)
    lags = (lags - lags[:, None]).clamp(min=0)  # [m - l, m]
    return some @ (others[:, lags] * torch.tensor(choices, device=others.device).to(others.dtype))
