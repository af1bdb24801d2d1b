"""The statistics of a certificate: pure functions from numbers to p-values, and what they find.

If a text has the target's law, three things are known:

- `uniform`: a token's place in its law, with a coin inside its own mass, is uniform given all
  tokens before it (Rosenblatt 1952). So the places along a text are independent uniform numbers.
  The test is Kolmogorov and Smirnov's, with its exact law.
- `independent`: two such places are independent. The test sums products of Legendre polynomials
  over pairs. The sums are uncorrelated with known variance even where pairs overlap, because each
  pair ends with a number that is independent of all before it.
- `exchangeable`: texts sampled from one prompt in two ways may be exchanged, whatever the
  dependence inside a text. The test permutes whole texts.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.stats import chi2, kstest, ncx2
from torch import Tensor

POWER = 0.99
DEGREES = 2  # of the polynomials: a slope and a bend
CELLS = 64  # cells of the histograms that `exchangeable` compares
ROUNDS = 4  # permutations are this over the error: the least p-value is a quarter of the error


def uniform(numbers: Tensor) -> float:
    """p-value of numbers [n] being uniform and independent; 1 without numbers."""
    return float(kstest(numbers.double().numpy(), "uniform").pvalue) if len(numbers) else 1.0


def least_gap(n: int, error: float) -> float:
    """The gap between two cumulated laws that `uniform` finds in n numbers with probability POWER.

    The bound of Dvoretzky, Kiefer, Wolfowitz and Massart, once for the error and once for a miss.
    """
    return sum(math.sqrt(math.log(2 / chance) / (2 * max(n, 1))) for chance in (error, 1 - POWER))


def independent(pairs: Tensor) -> float:
    """p-value of pairs [n, 2] of uniform numbers being independent; 1 without pairs."""
    if not len(pairs):
        return 1.0
    centred = 2 * pairs.double() - 1
    slope, bend = math.sqrt(3) * centred, math.sqrt(5) * (1.5 * centred**2 - 0.5)
    polynomials = torch.stack([slope, bend], dim=-1)  # [n, 2, 2]
    products = polynomials[:, 0, :, None] * polynomials[:, 1, None, :]
    return float(chi2.sf(float((products.sum(0) ** 2).sum()) / len(pairs), DEGREES**2))


def least_correlation(n: int, error: float) -> float:
    """The correlation of two places that `independent` finds in n pairs with probability POWER."""
    critical = chi2.isf(error, DEGREES**2)
    low, high = 0.0, 4 * critical + 100
    for _ in range(60):
        middle = (low + high) / 2
        if ncx2.sf(critical, DEGREES**2, max(middle, 1e-12)) < POWER:
            low = middle
        else:
            high = middle
    return min(1.0, math.sqrt(high / max(n, 1)))


def exchangeable(
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    groups: tuple[Sequence[int], Sequence[int]],
    error: float,
) -> tuple[float, float]:
    """p-value of two samples of texts being alike, and the gap found with probability POWER.

    The statistic is the largest gap between the cumulated histograms of the two samples' numbers.
    ours, theirs: for each text its numbers [n] in [0, 1].
    groups: for each text the group that it was sampled in; labels are permuted inside a group.
    """
    # 1. The observed gap.
    rows = [torch.histc(text.double(), CELLS, 0, 1) for text in (*ours, *theirs)]
    histograms = torch.stack(rows)  # [T, CELLS]
    group = np.array([*groups[0], *groups[1]])
    mine = torch.zeros(len(group), dtype=torch.float64)
    mine[: len(ours)] = 1
    observed = float(gaps(mine[None], histograms)[0])

    # 2. The gaps under permuted labels, 1000 at a time.
    generator, parts = np.random.default_rng(0), []
    rounds = math.ceil(ROUNDS / error)
    for start in range(0, rounds, 1000):
        labels = np.zeros((min(1000, rounds - start), len(group)))
        for number in np.unique(group):
            (texts,) = np.nonzero(group == number)
            copies = np.tile(mine[texts].numpy(), (len(labels), 1))
            labels[:, texts] = generator.permuted(copies, axis=1)
        parts.append(gaps(torch.from_numpy(labels), histograms))
    permuted = torch.cat(parts)

    # 3. The share of them that is as large, and the gap that would be found.
    p_value = (1 + int((permuted >= observed - 1e-12).sum())) / (1 + rounds)
    critical, usual = torch.quantile(permuted, permuted.new_tensor([1 - error, POWER])).tolist()
    return p_value, critical + usual


def gaps(labels: Tensor, histograms: Tensor) -> Tensor:
    """[M] the largest gap between the cumulated shares of the two sides.

    labels: [M, T] 1 for a text of ours, else 0. histograms: [T, CELLS].
    """
    ours = labels @ histograms
    theirs = histograms.sum(0) - ours
    shares = [side.cumsum(1) / side.sum(1, keepdim=True).clamp(min=1) for side in (ours, theirs)]
    return (shares[0] - shares[1]).abs().amax(1)
