"""A test of a scheme by its one rule, on small p and q: over all draws, the plans must average to p.

Draws are sampled, thousands at a time, and their plans averaged, so that no coin adds noise. The pairs of p and q are
fractions, the simplest first, so that the first failure is a counterexample that one can follow by hand:

    2 tokens, 1 draw    p (1/2, 1/2)    q (1, 0)        then (2/3, 1/3), …, 3 tokens, 2 draws, …
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import TypeAlias

import torch
from torch import Tensor

from treespec.errors import get_first_line
from treespec.trees.tree import Draws
from treespec.verify.distributions import sum_mass_on
from treespec.verify.scheme import Scheme

CASE_SIZES = ((2, 1), (2, 2), (3, 1), (3, 2), (3, 3))  # tokens and draws, the smallest first
MAX_DENOMINATORS = {2: 4, 3: 3}  # tokens -> the largest denominator of the probabilities in p and q
ROUNDING_ERROR = 1e-4  # of a plan in float32

Fractions: TypeAlias = tuple[Fraction, ...]


@dataclass(frozen=True)
class SchemeCase:
    """A pair of p and q [V], and the number of draws."""

    p: Fractions
    q: Fractions
    draws: int

    def __str__(self) -> str:
        draws = "draw"
        if self.draws > 1:
            draws = "draws"
        return (
            f"{len(self.p)} tokens, {self.draws} {draws}, p = {format_fractions(self.p)}, "
            f"q = {format_fractions(self.q)}"
        )


def format_fractions(probabilities: Fractions) -> str:
    """Format probabilities: (1/2, 1/2)."""
    return f"({', '.join(map(str, probabilities))})"


@dataclass(frozen=True)
class SchemeConformance:
    """The result of `check_scheme`.

    Attributes:
        fault: what is wrong at the smallest counterexample; "" if the scheme passed.
        case: the smallest counterexample; None if the scheme passed.
        cases: pairs of p and q, with each number of draws.
        precision: the largest error of a probability that may have stayed unseen.
        error: probability that a lossless scheme fails.
        remarks: what the scheme says of itself and does not hold; its texts may be right all the same.
    """

    fault: str
    case: SchemeCase | None
    cases: int
    precision: float
    error: float
    remarks: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.case is None

    def __str__(self) -> str:
        lines = [f"not lossless. The smallest example: {self.case}: {self.fault}"]
        if self.passed:
            lines = [
                f"lossless on {self.cases:,} pairs of p and q, the output is p to within {self.precision:.1%}, at "
                f"error {self.error:g}"
            ]
        return "\n".join(lines + self.remarks)


def check_scheme(
    scheme: Scheme, rows: int = 20_000, error: float = 0.001, seconds: float = 50
) -> SchemeConformance:
    """Test whether a scheme is lossless. A lossless scheme fails with probability `error` at most.

    Args:
        scheme: makes draws and plans.
        rows: samples of draws for each pair of p and q. More samples find smaller faults.
        error: shared by all tests, by the empirical Bernstein bound (Maurer and Pontil 2009).
        seconds: after this time a slow scheme is not tried on larger p and q.
    """
    end = time.monotonic() + seconds
    cases = list(list_scheme_cases(scheme.max_draws))
    generator = torch.Generator().manual_seed(0)
    risk = error / sum(2 * len(case.p) + 1 for case in cases)
    precision = 0.0
    rate_remarks: list[str] = []
    number = 0
    for number, case in enumerate(cases, 1):
        if time.monotonic() > end:
            break
        sampled = sample_case(scheme, case, rows, generator)
        if isinstance(sampled, str):
            return SchemeConformance(sampled, case, number, precision, error)
        output, wide = estimate_mean(sampled.plans, risk)
        wrong = (output - to_row(case.p)).abs() > wide
        if wrong.any():
            fault = f"the output is {format_numbers(output)}"
            return SchemeConformance(fault, case, number, precision, error)
        precision = max(precision, float(wide.max()))
        if sampled.rate is not None and not rate_remarks:
            accepted, wide = estimate_mean(sampled.accepted[:, None], risk)
            if abs(float(accepted) - sampled.rate) > float(wide):
                rate_remarks.append(
                    f"acceptance_rate is wrong at {case}: it says {sampled.rate:.3f}, the plans accept "
                    f"{float(accepted):.3f}"
                )
    remarks = rate_remarks + check_declared_draws(scheme, rows, error, generator)
    return SchemeConformance("", None, number, precision, error, remarks)


def list_scheme_cases(max_draws: int | None) -> Iterator[SchemeCase]:
    """List the pairs of p and q for each size: those of the smallest denominators first."""
    for vocab, draws in CASE_SIZES:
        if max_draws is not None and draws > max_draws:
            continue
        pairs = product(list_distributions(vocab), repeat=2)
        for p, q in sorted(pairs, key=count_complexity):
            yield SchemeCase(p, q, draws)


def list_distributions(vocab: int) -> list[Fractions]:
    """List the distributions over `vocab` tokens with a small common denominator."""
    found = dict[Fractions, None]()
    for denominator in range(1, MAX_DENOMINATORS[vocab] + 1):
        for numerators in product(range(denominator, -1, -1), repeat=vocab):
            if sum(numerators) == denominator:
                found[tuple(Fraction(part, denominator) for part in numerators)] = None
    return list(found)


def count_complexity(pair: Sequence[Fractions]) -> int:
    """Sum the denominators of p and q."""
    return sum(part.denominator for distribution in pair for part in distribution)


@dataclass(frozen=True)
class SampledCase:
    """Plans of sampled draws.

    Attributes:
        plans: [R, V] of each sample of draws.
        accepted: [R] the plans' mass on their draws.
        rate: what the scheme says that the mean of `accepted` is; None: it does not say.
    """

    plans: Tensor
    accepted: Tensor
    rate: float | None


def sample_case(
    scheme: Scheme, case: SchemeCase, rows: int, generator: torch.Generator
) -> SampledCase | str:
    """Sample the plans of a case; a text says what no plan may be, or how the scheme fails."""
    p = to_row(case.p).float().expand(rows, -1).contiguous()
    q = to_row(case.q).float().expand(rows, -1).contiguous()
    try:
        draws = scheme.draw(q, case.draws, generator)
        plans = scheme.plan(p, q, draws)
        rate = scheme.acceptance_rate(p[:1], q[:1], case.draws)
        alone = scheme.plan(p[:1], q[:1], draws.select_rows(slice(1)))
    except Exception as error:  # a stranger's code may raise anything
        return f"the scheme fails with {type(error).__name__}: {get_first_line(error)}"
    fault = find_plan_fault(plans, alone, draws, len(case.p))
    if fault:
        return fault
    accepted = sum_mass_on(plans, draws.tokens)
    return SampledCase(plans, accepted, None if rate is None else float(rate))


def find_plan_fault(plans: Tensor, alone: Tensor, draws: Draws, vocab: int) -> str:
    """Find out why plans [R, V] are none; "" if they are distributions of nodes that know nothing of each other.

    alone: [1, V] the plan of the first row without the others.
    """
    if draws.tokens.max() >= vocab or draws.tokens.min() < -1:
        return f"a draw is token {int(draws.tokens.max())} of {vocab}"
    if not plans.isfinite().all():
        return "a plan holds a number that is not finite"
    if plans.min() < -ROUNDING_ERROR:
        return f"a plan holds {float(plans.min()):.3f}"
    totals = plans.sum(-1)
    if (totals - 1).abs().max() > 10 * ROUNDING_ERROR:
        return f"a plan sums to {float(totals[(totals - 1).abs().argmax()]):.3f}"
    if (alone - plans[:1]).abs().max() > ROUNDING_ERROR:
        return "the plan of a node depends on the other nodes"
    return ""


def to_row(probabilities: Fractions) -> Tensor:
    """Convert probabilities to [1, V] float64."""
    return torch.tensor([list(map(float, probabilities))], dtype=torch.float64, device="cpu")


def format_numbers(row: Tensor) -> str:
    """Format probabilities [1, V] with three decimals."""
    return f"({', '.join(f'{value:.3f}' for value in row[0].tolist())})"


def estimate_mean(values: Tensor, risk: float) -> tuple[Tensor, Tensor]:
    """Compute the mean [1, V] of values [R, V] in [0, 1], and how far it is from its expectation at most.

    risk: probability that any one mean is farther.
    """
    values = values.double()
    rows = len(values)
    log_risk = math.log(2 / risk)
    spread = (2 * values.var(0, keepdim=True) * log_risk / rows).sqrt()
    return values.mean(0, keepdim=True), spread + 7 * log_risk / (3 * (rows - 1)) + ROUNDING_ERROR


def check_declared_draws(
    scheme: Scheme, rows: int, error: float, generator: torch.Generator
) -> list[str]:
    """Test what a scheme says in `random_draws`, on which α* depends: remarks, none if it holds."""
    if scheme.random_draws not in ("independent", "without replacement") or scheme.max_draws == 1:
        return []
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64, device="cpu")
    draws = scheme.draw(q.float().expand(rows, -1).contiguous(), 2, generator)
    tokens = draws.tokens[:, :2]
    if draws.sure is not None or tokens.min() < 0:
        return []
    expected = torch.outer(q, q)
    if scheme.random_draws == "without replacement":
        expected = (expected / (1 - q)[:, None]).fill_diagonal_(0)
    counts = (tokens[:, 0] * len(q) + tokens[:, 1]).bincount(minlength=len(q) ** 2)
    share = (counts.double() / rows).view_as(expected)
    farthest = (share - expected).abs()
    if farthest.max() <= math.sqrt(math.log(2 * len(q) ** 2 / error) / (2 * rows)):
        return []
    first, second = divmod(int(farthest.argmax()), len(q))
    return [
        f"random_draws says {scheme.random_draws}, but with q = (0.5, 0.3, 0.2) the draws {first} {second} have "
        f"{float(share[first, second]):.3f}, not {float(expected[first, second]):.3f}: its α* would be another's"
    ]
