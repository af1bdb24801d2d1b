"""Acceptance rates: those the schemes state, those of their plans, the optimum of their draws' law, published ones."""

import math

import pytest
import torch
from enumeration import (
    CASES,
    ENUMERABLE,
    SCHEMES,
    enumerate_plans,
    law,
    optimum,
    outcomes,
    random_law,
    scheme_by_name,
)
from torch import Tensor

from treespec.trees.tree import Draws
from treespec.verify.rates import optimal_iid


def tied(q: list[float], number: int) -> bool:
    return 0 < number < len(q) and sorted(q)[-number] == sorted(q)[-number - 1]


STATED = [
    *[("single", 1), ("spechub", 1), ("spechub", 2), ("rrs-wo", 1)],
    *[(name, k) for name in ("rrs", "kseq", "greedy", "otm-lp", "topk", "typical") for k in (1, 2, 3)],
    *[(name, k) for name in ("is-lp", "is-lp:s=2", "is-lp:alphabet=2", "is-lp:s=1,alphabet=3") for k in (1, 2)],
]
# Where equals stand on both sides of the last likeliest token, either may be drawn.
CLEAR = [
    (name, k, case)
    for name, k in STATED
    for case, (_, q) in CASES.items()
    if name not in ("greedy", "topk", "typical") or not tied(q, k - 1 if name == "greedy" else k)
]
OPTIMAL = [("single", 1), ("spechub", 2), ("greedy", 2), ("greedy", 3), ("topk", 2), ("is-lp", 2)]
OPTIMAL += [("otm-lp", k) for k in (1, 2, 3)]


def stated(name: str, p: Tensor, q: Tensor, k: int) -> float:
    rate = scheme_by_name(name, allow_lossy=True).acceptance_rate(p[None], q[None], k)
    assert rate is not None
    assert rate.shape == (1,)
    assert rate.dtype == p.dtype
    return rate.item()


def of_the_plan(name: str, p: Tensor, q: Tensor, k: int) -> float:
    [(_, rate)] = enumerate_plans(scheme_by_name(name, allow_lossy=True), p, q, [k])
    return rate.item()


@pytest.mark.parametrize(("name", "k", "case"), CLEAR)
def test_the_stated_rate_is_that_of_the_plan(name: str, k: int, case: str) -> None:
    p, q = map(law, CASES[case])
    assert stated(name, p, q, k) == pytest.approx(of_the_plan(name, p, q, k), rel=0, abs=1e-12)


@pytest.mark.parametrize(("name", "k"), STATED)
def test_the_stated_rate_is_that_of_the_plan_for_random_laws(name: str, k: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        p, q = random_law(5, generator), random_law(5, generator)
        assert stated(name, p, q, k) == pytest.approx(of_the_plan(name, p, q, k), rel=0, abs=1e-12)


@pytest.mark.parametrize("name", ["rrs", "is-lp", "is-lp:s=2,alphabet=2"])
def test_the_stated_rate_is_that_of_the_plan_where_each_draw_has_its_own_law(name: str) -> None:
    p = law([0.1, 0.2, 0.3, 0.4])
    q = law([[0.4, 0.3, 0.2, 0.1], [0, 0.1, 0.2, 0.7]])
    assert stated(name, p, q, 2) == pytest.approx(of_the_plan(name, p, q, 2), rel=0, abs=1e-12)


@pytest.mark.parametrize("name", ENUMERABLE)
def test_no_plan_accepts_more_than_the_optimum_of_its_draws(name: str) -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        p, q = random_law(4, generator), random_law(4, generator)
        for k in range(1, (SCHEMES[name].max_draws or 3) + 1):
            assert of_the_plan(name, p, q, k) <= optimum(outcomes(name, q, k), p) + 1e-7


@pytest.mark.parametrize(("name", "k"), OPTIMAL)
def test_schemes_that_are_optimal_for_their_draws_reach_the_optimum(name: str, k: int) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(10):
        p, q = random_law(5, generator), random_law(5, generator)
        assert of_the_plan(name, p, q, k) == pytest.approx(optimum(outcomes(name, q, k), p), rel=0, abs=1e-7)


def test_kseq_accepts_at_least_its_share_of_the_optimum_and_no_independent_draws_accept_more_than_that() -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(10):
        p, q = random_law(6, generator), random_law(6, generator)
        for k in (1, 2, 3):
            best = stated("otm-lp", p, q, k)
            assert stated("kseq", p, q, k) >= (1 - 1 / math.e) * best - 1e-9
            for name in ("kseq", "rrs", "is-lp"):
                assert of_the_plan(name, p, q, k) <= best + 1e-9


@pytest.mark.parametrize("case", CASES)
def test_one_draw_of_kseq_is_the_single_draft_plan(case: str) -> None:
    p, q = (law(values)[None] for values in CASES[case])
    for token in range(4):
        plans = [SCHEMES[name].plan(p, q, Draws(torch.tensor([[token]]))) for name in ("kseq", "single")]
        torch.testing.assert_close(*plans, rtol=0, atol=1e-14)


def test_rates_that_have_no_closed_form_are_not_stated() -> None:
    p, q = (law(values)[None] for values in CASES["plain"])
    assert SCHEMES["rrs-wo"].acceptance_rate(p, q, 2) is None
    assert SCHEMES["is-lp"].acceptance_rate(p, q, 3) is None


@pytest.mark.parametrize("s", [1, 2, 3, 6])
def test_a_program_of_few_tokens_is_within_its_bound_of_the_optimum(s: int) -> None:
    """Khisti et al. 2025: short of α* by at most the sum of (p - q^2)+ over the tokens that it does not see."""
    generator = torch.Generator().manual_seed(4)
    for _ in range(40):
        p, q = random_law(6, generator), random_law(6, generator)
        unseen = (p - q * q).sort(descending=True).values[s:].clamp(min=0).sum()
        best = optimal_iid(p[None], q[None], 2).item()
        rate = stated(f"is-lp:s={s}", p, q, 2)
        assert best - unseen - 1e-9 <= rate <= best + 1e-9


# Khisti et al. 2025, figure 2: target (t1, t2, 1 - t1 - t2), the optimum and two other schemes for two draws.
@pytest.mark.parametrize(
    ("t1", "t2", "best", "kseq", "rrs"),
    [
        (1 / 3, 0, 0.8889, 0.8114, 0.7778),
        (1 / 3, 1 / 9, 1, 0.8889, 0.8519),
        (1 / 3, 2 / 9, 1, 0.9576, 0.9259),
        (1 / 3, 1 / 3, 1, 1, 1),
        (1 / 6, 0, 0.7222, 0.6866, 0.6667),
        (1 / 6, 0.1389, 0.8611, 0.7912, 0.7593),
        (1 / 6, 0.2778, 1, 0.8889, 0.8519),
        (1 / 6, 0.4167, 1, 0.9625, 0.9444),
    ],
)
def test_two_uniform_draws_are_accepted_as_published(
    t1: float, t2: float, best: float, kseq: float, rrs: float
) -> None:
    p, q = law([t1, t2, 1 - t1 - t2]), law([1 / 3, 1 / 3, 1 / 3])
    assert stated("rrs", p, q, 2) == pytest.approx(rrs, rel=0, abs=1e-4)
    assert stated("kseq", p, q, 2) == pytest.approx(kseq, rel=0, abs=1e-4)
    for name in ("is-lp", "otm-lp"):
        assert stated(name, p, q, 2) == pytest.approx(best, rel=0, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "rate"),
    [("rrs", 0.8), ("is-lp", 0.85), ("otm-lp", 0.85), ("rrs-wo", 0.94), ("spechub", 1), ("greedy", 1)],
)
def test_schemes_rank_as_known_on_three_tokens(name: str, rate: float) -> None:
    assert of_the_plan(name, law([0.1, 0.6, 0.3]), law([0.5, 0.3, 0.2]), 2) == pytest.approx(rate, abs=1e-9)


def test_kseq_accepts_what_its_quadratic_says() -> None:
    """At ρ in (1, 2) only token 0 has p < ρq: β = .1/ρ + .5 and 2 - β = ρ, so ρ = (1.5 + sqrt(1.85)) / 2."""
    rho = (1.5 + math.sqrt(1.85)) / 2
    p, q = law([0.1, 0.6, 0.3]), law([0.5, 0.3, 0.2])
    assert stated("kseq", p, q, 2) == pytest.approx(rho * (0.1 / rho + 0.5), abs=1e-12)
    assert stated("kseq", p, q, 2) == pytest.approx(0.815, abs=5e-4)
