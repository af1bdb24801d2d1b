"""`valued` is lossless for any prices, and near the most that any plan brings by the values of its draws."""

from collections.abc import Sequence

import pytest
import torch
from enumeration import CASES, Outcome, independent, law, optimum, outcomes, random_law
from scipy.stats import chisquare
from torch import Tensor

from treespec.errors import InputError
from treespec.sampling import sample
from treespec.trees.tree import Draws
from treespec.verify import valued
from treespec.verify.rates import optimal_iid
from treespec.verify.registry import scheme_by_name
from treespec.verify.valued import Valued, arranged

NEAR, ON_AVERAGE = 0.015, 0.001  # of the largest value
VALUES = [(2, 1.5, 1), (3, 1, 1), (1, 1, 1), (1, 0, 0), (2, 1)]


def zipf(rows: int, vocabulary: int, spread: float) -> tuple[Tensor, Tensor]:
    """[B, V] p and q: Zipf's law, both with noise of their own."""
    generator = torch.Generator().manual_seed(1)
    logits = -1.3 * torch.arange(1.0, vocabulary + 1, dtype=torch.float64).log()
    noise = torch.randn(2, rows, vocabulary, generator=generator, dtype=torch.float64)
    p, q = (logits + spread * noise).softmax(-1)
    return p, q


def pairs() -> list[tuple[Tensor, Tensor]]:
    """Laws of up to six tokens: all the cases, some at random, some by Zipf."""
    generator = torch.Generator().manual_seed(2)
    found = [(law(p), law(q)) for p, q in CASES.values()]
    found += [(random_law(6, generator), random_law(6, generator)) for _ in range(8)]
    return [*found, *zip(*zipf(8, 6, 1), strict=True)]


def output(scheme: Valued, p: Tensor, q: Tensor, found: list[Outcome], draws: Draws | None = None) -> Tensor:
    """[V] the law of the output. draws: those found, as the scheme arranges them."""
    tokens, weights = zip(*found, strict=True)
    plan = scheme.plan(p.expand(len(found), -1), q.expand(len(found), -1), draws or Draws(torch.tensor(tokens)))
    return law([*weights]) @ plan


def brought(scheme: Valued, p: Tensor, q: Tensor, found: list[Outcome]) -> float:
    """The sum over draws of value * Pr(output is the draw); of a repeated token the first draw has a node."""
    tokens = torch.tensor([draws for draws, _ in found])
    plan = scheme.plan(p.expand(len(found), -1), q.expand(len(found), -1), Draws(tokens))
    first = ~(tokens[:, :, None] == tokens[:, None]).tril(-1).any(-1)
    values = (plan.gather(1, tokens) * first) @ law([*scheme.values])
    return float(law([mass for _, mass in found]) @ values)


@pytest.mark.parametrize("values", VALUES)
def test_the_value_is_near_that_of_the_linear_program_and_never_above(values: Sequence[float]) -> None:
    scheme = Valued(tuple(map(float, values)))
    k = len(values)
    gaps = []
    for p, q in pairs():
        found = outcomes("valued", q, k)
        best = optimum(found, p, values)
        stated = (scheme.accepted(p[None], q[None], k) @ law([*values])).item()
        assert stated - 1e-9 <= brought(scheme, p, q, found) <= best + 1e-7
        gaps.append((best - stated) / values[0])
    assert max(gaps) < NEAR
    assert sum(gaps) / len(gaps) < ON_AVERAGE


@pytest.mark.parametrize("spread", [0.5, 1, 2])
def test_equal_values_come_near_the_optimal_rate_and_a_single_value_near_that_of_one_draw(spread: float) -> None:
    p, q = zipf(5, 1000, spread)
    equal = Valued((1.0,)).accepted(p, q, 4).sum(-1)
    alone = Valued((1.0, 0.0)).accepted(p, q, 4)[:, 0]
    for found, best in ((equal, optimal_iid(p, q, 4)), (alone, p.minimum(q).sum(-1))):
        assert (found <= best + 1e-9).all()
        assert (found >= best - NEAR).all()


@pytest.mark.parametrize("cells", [3, 6])
@pytest.mark.parametrize("k", [2, 3])
def test_the_output_has_the_target_law_whatever_the_prices_and_the_cells(
    k: int, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(3)
    cost = 60 * torch.rand(6, generator=generator, dtype=torch.float64)
    monkeypatch.setattr(valued, "CELLS", cells)
    monkeypatch.setattr(valued, "prices", lambda p, *_: cost[: p.shape[1]].expand_as(p))
    for p, q in pairs():
        torch.testing.assert_close(output(Valued(), p, q, outcomes("valued", q, k)), p, rtol=0, atol=1e-12)


def drawn_until_distinct(q: Tensor, k: int) -> list[Outcome]:
    """The independent draws that `extra` makes for k distinct ones to be expected."""
    tokens = Valued(extra=1).draw(q[None], k, torch.Generator().manual_seed(4)).tokens
    return [o for o in independent([q.tolist()] * int((tokens >= 0).sum())) if o[1] > 0]


@pytest.mark.parametrize("q", [[0.1, 0.7, 0.1, 0.1], [0.6, 0.2, 0.2, 0], [0, 0, 1, 0]])
def test_more_draws_than_nodes_have_the_target_law_too(q: list[float]) -> None:
    """However they are arranged: the order of drawing tells which is which."""
    p, scheme = law([0.1, 0.2, 0.3, 0.4]), Valued(extra=1)
    found = drawn_until_distinct(law(q), 2)
    as_drawn = torch.tensor([draws for draws, _ in found])
    assert as_drawn.shape[1] > 2
    draws = arranged(as_drawn)
    torch.testing.assert_close(output(scheme, p, law(q), found, draws), p, rtol=0, atol=1e-12)
    if 1 not in q:
        forgotten = Draws(draws.tokens, torch.arange(as_drawn.shape[1]).expand_as(as_drawn))
        assert (output(scheme, p, law(q), found, forgotten) - p).abs().max() > 1e-6


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_first_draws_are_distinct_or_absent_and_about_as_many_as_asked_for(k: int) -> None:
    _, q = zipf(300, 1000, 0.7)
    drawn = Valued(extra=1).draw(q, k, torch.Generator().manual_seed(5)).tokens
    assert drawn.shape[1] >= k
    for row in drawn[:, :k].tolist():
        assert len({*row} - {-1}) == k - row.count(-1)
    distinct = [len({*row} - {-1}) for row in drawn.tolist()]
    assert abs(sum(distinct) / len(distinct) - k) < 0.6


@pytest.mark.parametrize("extra", [0, 1])
def test_sampled_outputs_follow_the_target_law(extra: int) -> None:
    """χ² at an error probability of 1e-4, in float32."""
    p, q = (law(values).float().expand(500, -1) for values in CASES["plain"])
    scheme, generator = Valued(extra=extra), torch.Generator().manual_seed(6)
    seen = torch.zeros(4, dtype=torch.float64)
    for _ in range(4):
        plan = scheme.plan(p, q, scheme.draw(q, 3, generator))
        assert plan.dtype == torch.float32
        seen += sample(plan, generator).bincount(minlength=4)
    assert chisquare(seen, 2000 * law(CASES["plain"][0])).pvalue > 1e-4


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("values=1/2", "none above the one before"),
        ("values=0/0", "the first must be positive"),
        ("values=2/-1", "none above the one before"),
        ("values=inf/1", "the first must be positive"),
        ("values=nan", "the first must be positive"),
        ("values=deep", "values must be numbers, such as"),
        ("extra=2", "extra is 2, must be 0 or 1"),
    ],
)
def test_a_bad_option_is_named(spec: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        scheme_by_name(f"valued:{spec}")
    assert words in str(error.value)
