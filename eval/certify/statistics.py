"""Compute the p-values of a certificate's tests, and the smallest faults that the tests find. All are pure functions.

If a text has the target's distribution, then:

- `compute_uniform_p_value`: a token's rank in its distribution (`treespec.eval.certify.draws.place_tokens`) is uniform
  given all earlier tokens (Rosenblatt 1952). So the ranks along a text are independent uniform numbers. The test is
  Kolmogorov and Smirnov's.
- `compute_independence_p_value`: two such ranks are independent. The test sums products of Legendre polynomials over
  pairs. The sums are uncorrelated with known variance even if pairs overlap, because each pair ends with a number
  that is independent of all earlier ones.
- `compute_bet_p_value`: a bet on another distribution multiplies its stake by Pr(the event) under that distribution
  over Pr(the event) under the tested one. The stake is a martingale: it reaches 1 / p with probability at most p
  (Ville 1939), even if events depend on earlier ones.
- `compute_exchangeable_p_value`: two texts sampled from one prompt in two ways are exchangeable, whatever the
  dependence inside a text. The test exchanges whole texts.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from scipy.optimize import brentq
from scipy.stats import chi2, kstest, ncx2
from torch import Tensor

TEST_POWER = 0.99  # probability with which a test finds the smallest fault that it reports
POLYNOMIAL_DEGREES = 2  # degrees of the Legendre polynomials: 1 and 2
HISTOGRAM_CELLS = 64  # cells of the histograms that `compute_exchangeable_p_value` compares
BET_ODDS = (0.01, 0.5, 2.0)  # bets: the odds of a repeated draw are multiplied by these factors
# bets: a draw comes from this power of its distribution, as at a higher (below 1) or lower (above 1) temperature
BET_POWERS = (0.5, 0.95, 1.05, 2.0)


def compute_uniform_p_value(numbers: Tensor) -> float:
    """Compute the p-value of numbers [n] being independent and uniform on [0, 1] (Kolmogorov-Smirnov)."""
    return float(kstest(numbers.double().numpy(), "uniform").pvalue)


def find_least_gap(n: int, error: float) -> float:
    """Find the gap between two distribution functions that `compute_uniform_p_value` finds with `TEST_POWER`.

    It adds the bound of Dvoretzky, Kiefer, Wolfowitz and Massart for a false alarm to that for a miss.

    n: how many numbers are tested. error: probability of a false alarm.
    """
    gap = 0.0
    for probability in (error, 1 - TEST_POWER):
        gap += math.sqrt(math.log(2 / probability) / (2 * max(n, 1)))
    return gap


def compute_independence_p_value(pairs: Tensor) -> float:
    """Compute the p-value of pairs [n, 2] of uniform numbers being independent."""
    centred = 2 * pairs.double() - 1
    slope = math.sqrt(3) * centred
    bend = math.sqrt(5) * (1.5 * centred**2 - 0.5)
    polynomials = torch.stack([slope, bend], dim=-1)  # [n, 2, 2]
    products = torch.einsum("ni,nj->ij", polynomials[:, 0], polynomials[:, 1])
    return float(chi2.sf(float((products**2).sum()) / len(pairs), POLYNOMIAL_DEGREES**2))


def find_least_correlation(n: int, error: float) -> float:
    """Find the correlation of two ranks that `compute_independence_p_value` finds in n pairs with `TEST_POWER`."""
    critical = chi2.isf(error, POLYNOMIAL_DEGREES**2)
    shift = brentq(
        lambda x: ncx2.sf(critical, POLYNOMIAL_DEGREES**2, x) - TEST_POWER, 1e-9, 4 * critical + 100
    )
    return min(1.0, math.sqrt(shift / max(n, 1)))


def compute_bet_p_value(bets: Tensor) -> float:
    """Compute the p-value of A bets that share one stake evenly. bets: [n, A] log growth by event and bet."""
    stake = bets.double().sum(0).logsumexp(0) - math.log(bets.shape[1])
    return math.exp(min(0.0, -float(stake)))


def compute_odds_stakes(happened: Tensor, probability: Tensor) -> Tensor:
    """Compute the log growth [n, BET_ODDS] of bets that events have other odds.

    happened: [n] bool. probability: [n] of each event under the tested distribution.
    """
    probability, odds = probability.double()[:, None], probability.new_tensor(BET_ODDS).double()
    return odds.log() * happened[:, None] - (1 - probability + odds * probability).log()


def compute_power_stakes(p: Tensor, tokens: Tensor) -> Tensor:
    """Compute the log growth [n, BET_POWERS] of bets that tokens come from a power of their distribution.

    p: [n, V] masses; they need not sum to 1. tokens: [n] int64.
    """
    log_p = p.log()
    token_log_p = log_p.gather(1, tokens[:, None]).double()
    powers = token_log_p.new_tensor((1.0, *BET_POWERS))
    sums = []
    for power in powers.tolist():
        sums.append((power * log_p).exp().sum(1, dtype=torch.float64).log())
    totals = torch.stack(sums, dim=1)
    return (powers[1:] - 1) * token_log_p + totals[:, :1] - totals[:, 1:]


def compute_exchangeable_p_value(
    sides: Iterable[Sequence[Tensor]], error: float
) -> tuple[float, float]:
    """Compute the p-value of two samples of texts having one distribution, by a permutation test.

    The statistic is the largest gap between the cumulated histograms of both samples. A permutation exchanges the two
    texts of random pairs.

    Args:
        sides: two lists of texts, each text as numbers [n] in [0, 1]. The i-th texts of both sides have one prompt and
            one distribution.
        error: probability of a false alarm. There are enough permutations for a p-value of a quarter of it.

    Returns:
        The p-value, and the gap that the test finds with `TEST_POWER`.
    """
    histograms = []
    for side in sides:
        histograms.append(
            torch.stack([torch.histc(text.double(), HISTOGRAM_CELLS, 0, 1) for text in side])
        )
    our_histograms, plain_histograms = histograms
    differences = (our_histograms - plain_histograms).cumsum(1) / our_histograms.sum()  # [n, CELLS]
    generator = torch.Generator().manual_seed(0)
    rounds = math.ceil(4 / error)
    gaps = []
    for start in range(0, rounds, 1000):
        exchanged = torch.randint(
            2, (min(1000, rounds - start), len(our_histograms)), generator=generator, device="cpu"
        )
        gaps.append(((1.0 - 2 * exchanged).double() @ differences).abs().amax(1))
    permuted = torch.cat(gaps)
    observed = differences.sum(0).abs().max()
    critical, usual = torch.quantile(
        permuted, permuted.new_tensor([1 - error, TEST_POWER])
    ).tolist()
    return (1 + int((permuted >= observed - 1e-12).sum())) / (1 + rounds), critical + usual
