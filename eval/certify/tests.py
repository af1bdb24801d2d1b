"""The statistics of a certificate: pure functions from numbers to p-values, each with what it finds.

What is known of numbers when the text is the target's own:

- a token's place in its law, with a coin inside its own mass, is uniform given all before it (Rosenblatt 1952), so
  along a text the places are independent uniform numbers: `uniform`, by Kolmogorov and Smirnov's exact law;
- two such places are independent: `independent`, by products of Legendre polynomials, whose sums over pairs are
  uncorrelated with known variance even where pairs overlap, as each pair ends with a number fresh at its time;
- texts sampled from one prompt in two ways are exchangeable, whatever hangs together inside a text: `exchangeable`
  permutes whole texts.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.stats import chi2, kstest, ncx2
from torch import Tensor

POWER = 0.99
DEGREES = 2  # of the polynomials: a slope and a bend
CELLS = 64  # of the ranks that `exchangeable` compares
ROUNDS = 4  # permutations over 1 / error: the least p-value is a quarter of the error


def uniform(numbers: Tensor) -> float:
    """p-value of numbers [n] being uniform and independent; 1 without numbers."""
    return float(kstest(numbers.double().numpy(), "uniform").pvalue) if len(numbers) else 1.0


def least_gap(n: int, error: float) -> float:
    """The largest gap between two cumulated laws that `uniform` finds in n numbers with probability POWER.

    By the bound of Dvoretzky, Kiefer, Wolfowitz and Massart, once for the error and once for the miss.
    """
    return sum(math.sqrt(math.log(2 / chance) / (2 * max(n, 1))) for chance in (error, 1 - POWER))


def independent(pairs: Tensor) -> float:
    """p-value of pairs [n, 2] of uniform numbers being independent; 1 without pairs."""
    if not len(pairs):
        return 1.0
    centred = 2 * pairs.double() - 1
    polynomials = torch.stack(
        [math.sqrt(3) * centred, math.sqrt(5) * (1.5 * centred**2 - 0.5)], dim=-1
    )  # [n, 2, 2]
    products = polynomials[:, 0, :, None] * polynomials[:, 1, None, :]
    return float(chi2.sf(float((products.sum(0) ** 2).sum()) / len(pairs), DEGREES**2))


def least_correlation(n: int, error: float) -> float:
    """The correlation of two places that `independent` finds in n pairs with probability POWER."""
    critical = chi2.isf(error, DEGREES**2)
    low, high = 0.0, 4 * critical + 100
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if ncx2.sf(critical, DEGREES**2, max(middle, 1e-12)) < POWER
            else (low, middle)
        )
    return min(1.0, math.sqrt(high / max(n, 1)))


def exchangeable(
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    groups: tuple[Sequence[int], Sequence[int]],
    error: float,
) -> tuple[float, float]:
    """p-value of two samples of texts being alike, and the gap that is found with probability POWER.

    ours, theirs: of each text numbers in [0, 1], [n]. groups: of each text what it was sampled from; labels are
    permuted inside a group. The statistic is the largest gap between the two cumulated histograms of all numbers.
    """
    histograms = torch.stack(
        [torch.histc(row.double(), CELLS, 0, 1) for row in (*ours, *theirs)]
    )  # [T, CELLS]
    group = np.array([*groups[0], *groups[1]])
    mine = torch.zeros(len(group), dtype=torch.float64)
    mine[: len(ours)] = 1
    observed = float(gaps(mine[None], histograms)[0])
    generator, found = np.random.default_rng(0), []
    rounds = math.ceil(ROUNDS / error)
    for start in range(0, rounds, 1000):
        labels = np.zeros((min(1000, rounds - start), len(group)))
        for one in np.unique(group):
            (texts,) = np.nonzero(group == one)
            labels[:, texts] = generator.permuted(
                np.tile(mine[texts].numpy(), (len(labels), 1)), axis=1
            )
        found.append(gaps(torch.from_numpy(labels), histograms))
    permuted = torch.cat(found)
    p_value = (1 + int((permuted >= observed - 1e-12).sum())) / (1 + rounds)
    critical, usual = torch.quantile(permuted, permuted.new_tensor([1 - error, POWER])).tolist()
    return p_value, critical + usual


def gaps(labels: Tensor, histograms: Tensor) -> Tensor:
    """[M] the largest gap between the two sides' cumulated shares.

    labels: [M, T], 1 is ours. histograms: [T, CELLS].
    """
    ours = labels @ histograms
    theirs = histograms.sum(0) - ours
    shares = [side.cumsum(1) / side.sum(1, keepdim=True).clamp(min=1) for side in (ours, theirs)]
    return (shares[0] - shares[1]).abs().amax(1)
