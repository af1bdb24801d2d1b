"""Optimal rates against linear programs and exact sums over sets; measured rates against enumeration."""

import itertools

import pytest
import torch
from enumeration import CASES, Outcome, enumerate_plans, independent, law, optimum, outcomes, random_law, sequential
from torch import Tensor

from treespec.verify.rates import measured, optimal_iid, optimal_tops, optimal_without_replacement
from treespec.verify.registry import SCHEMES, scheme_by_name

OPTIMAL = {"rrs": optimal_iid, "rrs-wo": optimal_without_replacement}  # by a scheme that draws so


def tops_then_independent(q: list[float], k: int, tops: int) -> list[Outcome]:
    best = [x for x in sorted(range(len(q)), key=lambda x: -q[x])[:tops] if q[x] > 0]
    rest = [0.0 if x in best else mass for x, mass in enumerate(q)]
    if sum(rest) == 0:
        return [(tuple(best), 1.0)]
    tails = independent([[mass / sum(rest) for mass in rest]] * (k - tops))
    return [((*best, *tail), probability) for tail, probability in tails if probability > 0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OPTIMAL)
def test_the_optimal_rate_is_that_of_the_linear_program(name: str, case: str) -> None:
    p, q = map(law, CASES[case])
    for k in (1, 2, 3, 4):
        best = optimum(outcomes(name, q, k), p)
        assert OPTIMAL[name](p[None], q[None], k).item() == pytest.approx(best, rel=0, abs=1e-7)


@pytest.mark.parametrize("share", [1, 0.6])
@pytest.mark.parametrize("name", OPTIMAL)
def test_the_optimal_rate_is_that_of_the_linear_program_for_random_laws_and_shares_of_laws(
    name: str, share: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    p = share * torch.stack([random_law(6, generator) for _ in range(6)])
    q = torch.stack([random_law(6, generator) for _ in range(6)])
    for k in (1, 2, 3, 4):
        rows = range(6 if name == "rrs-wo" or k < 4 else 1)
        best = [optimum(outcomes(name, q[row], k), p[row]) for row in rows]
        torch.testing.assert_close(OPTIMAL[name](p, q, k)[: len(rows)], law(best), rtol=0, atol=1e-7)


@pytest.mark.parametrize(("k", "tops"), [(1, 0), (2, 1), (3, 1), (3, 2), (3, 3), (4, 2)])
def test_the_optimal_rate_of_tops_and_independent_draws_is_that_of_the_linear_program(k: int, tops: int) -> None:
    generator = torch.Generator().manual_seed(2)
    cases = [map(law, CASES[case]) for case in ("plain", "tiny q", "one-hot q", "two supported", "zeros in both")]
    for p, q in [*cases, *((random_law(5, generator), random_law(5, generator)) for _ in range(5))]:
        best = optimum(tops_then_independent(q.tolist(), k, tops), p)
        assert optimal_tops(p[None], q[None], k, tops).item() == pytest.approx(best, rel=0, abs=1e-7)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_greedy_and_topk_reach_the_optimal_rate_of_their_tops(k: int) -> None:
    generator = torch.Generator().manual_seed(3)
    p, q = (torch.stack([random_law(40, generator) for _ in range(20)]) for _ in "pq")
    for name, tops in (("greedy", k - 1), ("topk", k)):
        torch.testing.assert_close(
            SCHEMES[name].acceptance_rate(p, q, k), optimal_tops(p, q, k, tops), rtol=0, atol=1e-12
        )


def test_is_lp_that_frees_all_pairs_reaches_the_optimal_rate_of_two_draws() -> None:
    generator = torch.Generator().manual_seed(4)
    p, q = (torch.stack([random_law(8, generator) for _ in range(20)]) for _ in "pq")
    rate = scheme_by_name("is-lp:s=8").acceptance_rate(p, q, 2)
    torch.testing.assert_close(rate, optimal_iid(p, q, 2), rtol=0, atol=1e-12)


def smallest_cut(p: Tensor, found: list[Outcome]) -> float:
    """The minimum of p(H) + 1 - Q(H) over every set H."""
    sets = [({*draws}, probability) for draws, probability in found]
    cuts = []
    for size in range(len(p) + 1):
        for inside in itertools.combinations(range(len(p)), size):
            cuts.append(p[[*inside]].sum().item() + sum(mass for drawn, mass in sets if not drawn <= {*inside}))
    return min(cuts)


@pytest.mark.parametrize("spread", [0, 1, 3, 10])
@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_draws_without_replacement_are_exact_to_1e_9_for_masses_of_any_scale(k: int, spread: int) -> None:
    generator = torch.Generator().manual_seed(5)
    q = (spread * torch.randn(3, 6, generator=generator, dtype=torch.float64)).softmax(-1)
    p = torch.stack([random_law(6, generator) for _ in range(3)])
    best = [smallest_cut(p[row], list(sequential(q[row].tolist(), k))) for row in range(3)]
    torch.testing.assert_close(optimal_without_replacement(p, q, k), law(best), rtol=0, atol=1e-9)


def test_draws_without_replacement_are_not_those_of_the_generating_function() -> None:
    """Its law, Pr(S) in proportion to the product of q over S (conditional Poisson sampling), overstates the rate."""
    p, q = law([0.2, 0.3, 0.5]), law([0.6, 0.3, 0.1])
    weights = {pair: (q[pair[0]] * q[pair[1]]).item() for pair in itertools.combinations(range(3), 2)}
    other = optimum([(pair, weight / sum(weights.values())) for pair, weight in weights.items()], p)
    [rate] = optimal_without_replacement(p[None], q[None], 2).tolist()
    assert other == pytest.approx(5 / 6, rel=0, abs=1e-7)  # 1 + p(H) - .18 / .27 for H the first two
    assert rate == pytest.approx(0.5 + 1 - 0.6 * 0.3 / 0.4 - 0.3 * 0.6 / 0.7, rel=0, abs=1e-12)


@pytest.mark.parametrize(
    ("t1", "t2", "best"),
    [
        *[(1 / 3, 0, 0.8889), (1 / 3, 1 / 9, 1), (1 / 3, 2 / 9, 1), (1 / 3, 1 / 3, 1)],
        *[(1 / 6, 0, 0.7222), (1 / 6, 0.1389, 0.8611), (1 / 6, 0.2778, 1), (1 / 6, 0.4167, 1)],
    ],
)
def test_two_uniform_draws_are_accepted_as_published(t1: float, t2: float, best: float) -> None:
    """Khisti et al. 2025, figure 2."""
    p, q = law([t1, t2, 1 - t1 - t2])[None], torch.full((1, 3), 1 / 3, dtype=torch.float64)
    assert optimal_iid(p, q, 2).item() == pytest.approx(best, rel=0, abs=1e-4)


def test_optimal_rates_are_as_known_on_three_tokens() -> None:
    p, q = torch.tensor([[0.1, 0.6, 0.3]]), torch.tensor([[0.5, 0.3, 0.2]])
    torch.testing.assert_close(optimal_iid(p, q, 2), torch.tensor([0.85]))
    torch.testing.assert_close(optimal_tops(p, q, 2, 1), torch.tensor([1.0]))


@pytest.mark.parametrize("k", [2, 4])
def test_the_optimal_rate_at_vocabulary_size_is_the_sum_over_draws_by_class(k: int) -> None:
    """Tokens of three classes, equal within each, so Q is a sum over the 3^k sequences of classes; to 1e-9."""
    sizes, masses, ratios = torch.tensor([3, 1000, 148_997]), law([0.5, 0.3, 0.2]), law([0.1, 0.5, 4])
    of_token = torch.arange(3).repeat_interleave(sizes)
    q = (masses / sizes)[of_token]
    p = q * ratios[of_token]  # ascending ratios: prefixes are prefixes of the numbering
    held = torch.nn.functional.one_hot(of_token).cumsum(0).double()  # [V, 3] of each class in the prefix
    inside = torch.zeros_like(q)
    for classes in itertools.product(range(3), repeat=k):
        used, probability = torch.zeros(3, dtype=torch.float64), torch.ones_like(q)
        for c in classes:
            probability = probability * (held[:, c] - used[c]) * (masses / sizes)[c] / (1 - used @ (masses / sizes))
            used[c] += 1
        inside += probability
    best = (p.cumsum(0) + 1 - inside).min().clamp(max=1)
    assert best < 0.99
    [rate] = optimal_without_replacement(p[None], q[None], k)
    torch.testing.assert_close(rate, best, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("name", "k"), [("rrs-wo", 2), ("rrs-wo", 3), ("is-lp:s=2", 3)])
def test_measured_rates_are_the_enumerated_one_to_five_standard_errors(name: str, k: int, case: str) -> None:
    p, q = map(law, CASES[case])
    [(_, exact)] = enumerate_plans(scheme_by_name(name), p, q, [k])
    rows = 200 if name == "rrs-wo" else 20
    generator = torch.Generator().manual_seed(6)
    rate = measured(scheme_by_name(name), p.expand(rows, -1), q.expand(rows, -1), k, generator, samples=32)
    error = rate.error.square().sum().sqrt() / rows
    assert abs(rate.value.mean() - exact) <= 5 * error + 1e-9


@pytest.mark.parametrize(("name", "k"), [("rrs-wo", 2), ("rrs-wo", 4), ("is-lp:s=2", 3)])
def test_the_standard_error_is_the_spread_of_measurements_and_falls_as_the_root_of_samples(name: str, k: int) -> None:
    generator = torch.Generator().manual_seed(7)
    p, q = (random_law(30, generator).expand(200, -1) for _ in "pq")
    few, many = (measured(scheme_by_name(name), p, q, k, generator, samples) for samples in (32, 128))
    assert 0.8 < few.error.square().mean().sqrt() / few.value.std() < 1.25  # standard error of the spread: 5 %
    assert 1.8 < (few.error.square().mean() / many.error.square().mean()).sqrt() < 2.2


def test_the_measured_rate_of_rrs_wo_spreads_less_than_its_acceptances() -> None:
    """Less than a fifth of the binomial standard error."""
    generator = torch.Generator().manual_seed(8)
    q = torch.randn(20, 100, generator=generator, dtype=torch.float64)
    p = (q + torch.randn(20, 100, generator=generator)).softmax(-1)
    rate = measured(SCHEMES["rrs-wo"], p, q.softmax(-1), 3, generator)
    assert (rate.error < 0.2 * (rate.value * (1 - rate.value) / 64).sqrt()).all()


def test_a_stated_rate_is_taken_as_it_is() -> None:
    p, q = (law(values)[None] for values in CASES["plain"])
    rate = measured(SCHEMES["rrs"], p, q, 3, torch.Generator())
    assert rate.value.equal(SCHEMES["rrs"].acceptance_rate(p, q, 3))
    assert rate.error.tolist() == [0]
