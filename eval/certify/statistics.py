"""The statistics of a certificate: pure functions from numbers to p-values, and the smallest faults that they find.

If a text has the target's distribution, four things are known:

- `compute_uniform_p_value`: a token's place in its distribution, with a coin inside its own mass, is uniform given
  all tokens before it (Rosenblatt 1952). So the places along a text are independent uniform
  numbers. The test is Kolmogorov and Smirnov's.
- `compute_independence_p_value`: two such places are independent. The test sums products of Legendre polynomials
  over pairs. The sums are uncorrelated with known variance even where pairs overlap, because each
  pair ends with a number that is independent of all before it.
- `compute_bet_p_value`: a bet on another distribution multiplies its stake by Pr(the event) under that one,
  divided by Pr(the event) under the one in question. The stake is a martingale: it reaches 1 / p
  with probability at most p (Ville 1939), even where events depend on those before them.
- `compute_exchangeable_p_value`: two texts sampled from one prompt in two ways may be exchanged, whatever the
  dependence inside a text. The test exchanges whole texts.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from scipy.optimize import brentq
from scipy.stats import chi2, kstest, ncx2
from torch import Tensor

TEST_POWER = 0.99
POLYNOMIAL_DEGREES = 2  # of the polynomials: a slope and a bend
HISTOGRAM_CELLS = 64  # cells of the histograms that `compute_exchangeable_p_value` compares
BET_ODDS = (0.01, 0.5, 2.0)  # factors on the odds that a draw repeats another one
BET_POWERS = (
    0.5,
    0.95,
    1.05,
    2.0,
)  # powers of the distribution of a draw: hotter below 1, colder above


def compute_uniform_p_value(numbers: Tensor) -> float:
    """p-value of numbers [n] being uniform and independent."""
    return float(kstest(numbers.double().numpy(), "uniform").pvalue)


def find_least_gap(n: int, error: float) -> float:
    """The gap between two cumulated distributions that `compute_uniform_p_value` finds with probability POWER.

    n: numbers. The bound of Dvoretzky, Kiefer, Wolfowitz and Massart, for the error and for a miss.
    """
    gap = 0.0
    for probability in (error, 1 - TEST_POWER):
        gap += math.sqrt(math.log(2 / probability) / (2 * max(n, 1)))
    return gap


def compute_independence_p_value(pairs: Tensor) -> float:
    """p-value of pairs [n, 2] of uniform numbers being independent."""
    centred = 2 * pairs.double() - 1
    slope = math.sqrt(3) * centred
    bend = math.sqrt(5) * (1.5 * centred**2 - 0.5)
    polynomials = torch.stack([slope, bend], dim=-1)  # [n, 2, 2]
    products = torch.einsum("ni,nj->ij", polynomials[:, 0], polynomials[:, 1])
    return float(chi2.sf(float((products**2).sum()) / len(pairs), POLYNOMIAL_DEGREES**2))


def find_least_correlation(n: int, error: float) -> float:
    """The correlation of two places that `compute_independence_p_value` finds in n pairs with probability POWER."""
    critical = chi2.isf(error, POLYNOMIAL_DEGREES**2)
    shift = brentq(
        lambda x: ncx2.sf(critical, POLYNOMIAL_DEGREES**2, x) - TEST_POWER, 1e-9, 4 * critical + 100
    )
    return min(1.0, math.sqrt(shift / max(n, 1)))


def compute_bet_p_value(bets: Tensor) -> float:
    """p-value of A bets that share one stake evenly. bets: [n, A] log growth by event and bet."""
    stake = bets.double().sum(0).logsumexp(0) - math.log(bets.shape[1])
    return math.exp(min(0.0, -float(stake)))


def compute_odds_stakes(happened: Tensor, probability: Tensor) -> Tensor:
    """[n, ODDS] bets that events have other odds. happened: [n] bool; probability: [n] probabilities."""
    probability, odds = probability.double()[:, None], probability.new_tensor(BET_ODDS).double()
    return odds.log() * happened[:, None] - (1 - probability + odds * probability).log()


def compute_power_stakes(p: Tensor, tokens: Tensor) -> Tensor:
    """[n, POWERS] bets that tokens come from a power of their distribution.

    p: [n, V], not normalised. tokens: [n] int64.
    """
    logs = p.log()
    token_logs = logs.gather(1, tokens[:, None]).double()
    powers = token_logs.new_tensor((1.0, *BET_POWERS))
    sums = []
    for power in powers.tolist():
        sums.append((power * logs).exp().sum(1, dtype=torch.float64).log())
    totals = torch.stack(sums, dim=1)
    return (powers[1:] - 1) * token_logs + totals[:, :1] - totals[:, 1:]


def compute_exchangeable_p_value(
    sides: Iterable[Sequence[Tensor]], error: float
) -> tuple[float, float]:
    """p-value of two samples of texts being alike, and the gap found with probability POWER.

    sides: numbers [n] in [0, 1] of each text; the i-th texts of both have one prompt and one
    distribution. The statistic is the largest gap between the cumulated histograms of both samples.
    Permutations exchange the two texts of random pairs; the least p-value is a quarter of the error.
    """
    histograms = []
    for side in sides:
        histograms.append(
            torch.stack([torch.histc(text.double(), HISTOGRAM_CELLS, 0, 1) for text in side])
        )
    ours, theirs = histograms
    differences = (ours - theirs).cumsum(1) / ours.sum()  # [n, CELLS]
    generator = torch.Generator().manual_seed(0)
    rounds = math.ceil(4 / error)
    gaps = []
    for start in range(0, rounds, 1000):
        exchanged = torch.randint(2, (min(1000, rounds - start), len(ours)), generator=generator)
        gaps.append(((1.0 - 2 * exchanged).double() @ differences).abs().amax(1))
    permuted = torch.cat(gaps)
    observed = differences.sum(0).abs().max()
    critical, usual = torch.quantile(
        permuted, permuted.new_tensor([1 - error, TEST_POWER])
    ).tolist()
    return (1 + int((permuted >= observed - 1e-12).sum())) / (1 + rounds), critical + usual
