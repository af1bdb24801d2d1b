"""Acceptance rates: those that schemes state, those of their plans, optimal ones, published ones, measured ones."""

import itertools
import math

import numpy as np
import pytest
import torch
from models import close, seeded
from reference import (
    ENUMERABLE,
    SCHEMES,
    draw_independently,
    enumerate_plans,
    every_pair,
    list_draws,
    random_pairs,
    scheme_by_name,
    to_probs,
)
from scipy.optimize import linprog

from treespec.trees.tree import Draws
from treespec.verify.optimal import Optimal
from treespec.verify.rates import (
    bound_optimum,
    compute_optimal_iid,
    compute_optimal_tops_and_tail,
    compute_optimal_without_replacement,
    find_optimum,
    measure_rate,
)


def optimum(found, p):
    """The most that any plan accepts: mass from draws to their own tokens, a linear program (HiGHS, 1e-7)."""
    pairs = [(row, x) for row, (draws, _) in enumerate(found) for x in {*draws} - {-1}]
    uses = np.zeros((len(found) + len(p), len(pairs)))
    for column, (row, x) in enumerate(pairs):
        uses[row, column] = uses[len(found) + x, column] = 1
    supply = [probability for _, probability in found] + p.tolist()
    return -linprog(-np.ones(len(pairs)), A_ub=uses, b_ub=supply, method="highs").fun


BEST = {"rrs": compute_optimal_iid, "rrs-wo": compute_optimal_without_replacement}  # by a scheme that draws so
STATED = [("single", 1), ("spechub", 1), ("spechub", 2), ("rrs-wo", 1)]
STATED += [(name, k) for name in ("rrs", "kseq", "greedy", "topk", "typical") for k in (1, 2, 3)]
STATED += [(name, k) for name in ("is-lp", "is-lp:s=2", "is-lp:s=1") for k in (1, 2)]
OPTIMAL = [("single", 1), ("spechub", 2), ("greedy", 2), ("greedy", 3), ("topk", 2), ("is-lp", 2)]


def tied(q, number):
    """Equals on both sides of the last most likely token: either may be drawn."""
    return 0 < number < len(q) and q.sort().values[-number] == q.sort().values[-number - 1]


def stated(name, p, q, k):
    rate = scheme_by_name(name, allow_lossy=True).acceptance_rate(p[None], q[None], k)
    assert (rate.shape, rate.dtype) == ((1,), p.dtype)
    return rate.item()


def of_the_plan(name, p, q, k):
    [(_, rate)] = enumerate_plans(scheme_by_name(name, allow_lossy=True), p, q, [k])
    return rate.item()


@pytest.mark.parametrize("name, k", STATED)
def test_the_stated_rate_is_that_of_the_plan(name, k):
    pairs = every_pair(5)
    if name in ("greedy", "topk", "typical"):
        pairs = [(p, q) for p, q in pairs if not tied(q, k - (name == "greedy"))]
    for p, q in pairs:
        assert stated(name, p, q, k) == pytest.approx(of_the_plan(name, p, q, k), rel=0, abs=1e-12)


@pytest.mark.parametrize("name", ENUMERABLE)
def test_no_plan_beats_the_optimum_of_its_draws_and_some_reach_it(name):
    for p, q in random_pairs(10):
        for k in range(1, (SCHEMES[name].max_draws or 3) + 1):
            short = optimum(list_draws(name, q, k), p) - of_the_plan(name, p, q, k)
            assert -1e-7 <= short <= (1e-7 if (name, k) in OPTIMAL else 1)


def test_kseq_accepts_its_share_of_the_optimum_and_generalises_single():
    for p, q in random_pairs(10, 6):
        for k in (1, 2, 3):
            assert stated("kseq", p, q, k) >= (1 - 1 / math.e) * compute_optimal_iid(p[None], q[None], k).item() - 1e-9
        plans = [SCHEMES[name].plan(p[None], q[None], Draws(torch.tensor([[2]]))) for name in ("kseq", "single")]
        close(*plans, 1e-14)


@pytest.mark.parametrize("s", [1, 2, 3, 6])
def test_a_program_of_few_tokens_is_within_its_bound_of_the_optimum(s):
    """Khisti et al. 2025: short of α* by at most the sum of (p - q^2)+ over the tokens that it does not see."""
    for p, q in random_pairs(40, 6):
        unseen = (p - q * q).sort(descending=True).values[s:].clamp(min=0).sum()
        best = compute_optimal_iid(p[None], q[None], 2).item()
        assert best - unseen - 1e-9 <= stated(f"is-lp:s={s}", p, q, 2) <= best + 1e-9


# Khisti et al. 2025, figure 2: target (t1, t2, 1 - t1 - t2), the optimum and two other schemes for two draws.
@pytest.mark.parametrize(
    "t1, t2, best, kseq, rrs",
    [
        (1 / 3, 0, 0.8889, 0.8114, 0.7778),
        (1 / 3, 2 / 9, 1, 0.9576, 0.9259),
        (1 / 6, 0.1389, 0.8611, 0.7912, 0.7593),
        (1 / 6, 0.4167, 1, 0.9625, 0.9444),
    ],
)
def test_two_uniform_draws_are_accepted_as_published(t1, t2, best, kseq, rrs):
    p = to_probs([t1, t2, 1 - t1 - t2])
    q = to_probs([1 / 3, 1 / 3, 1 / 3])
    rates = [stated(name, p, q, 2) for name in ("rrs", "kseq", "is-lp")]
    rates.append(compute_optimal_iid(p[None], q[None], 2).item())
    assert rates == pytest.approx([rrs, kseq, best, best], rel=0, abs=1e-4)


def tops_then_independent(q, best, k):
    rest = [0.0 if x in best else mass for x, mass in enumerate(q)]
    if sum(rest) == 0:
        return [(tuple(best), 1.0)]
    tails = draw_independently([[mass / sum(rest) for mass in rest]] * k)
    return [((*best, *tail), probability) for tail, probability in tails if probability > 0]


@pytest.mark.parametrize("share", [1, 0.6])
@pytest.mark.parametrize("name", BEST)
def test_the_optimal_rate_is_that_of_the_linear_program(name, share):
    """Also of a share of a distribution."""
    for p, q in every_pair(2, 6):
        for k in (1, 2, 3) if name == "rrs" and len(p) > 4 else (1, 2, 3, 4):
            best = optimum(list_draws(name, q, k), share * p)
            assert BEST[name](share * p[None], q[None], k).item() == pytest.approx(best, rel=0, abs=1e-7)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_so_is_that_of_the_tops_and_draws_of_optimal(k):
    for p, q in every_pair(5):
        tops, number, _ = Optimal().split_certain_and_random(q[None], torch.tensor([[k]]), k)
        if number <= 4:
            sure = [x for x in tops[0].tolist() if x >= 0]
            best = optimum(tops_then_independent(q.tolist(), sure, int(number)), p)
            assert compute_optimal_tops_and_tail(p[None], q[None], k).item() == pytest.approx(best, rel=0, abs=1e-7)


@pytest.mark.parametrize("k", [2, 4])
def test_the_optimal_rate_at_vocabulary_size_is_a_sum_over_classes(k):
    """Tokens of three classes, equal within each, so Q is a sum over the 3^k sequences of classes; to 1e-9."""
    sizes = torch.tensor([3, 1000, 148_997])
    masses = to_probs([0.5, 0.3, 0.2])
    ratios = to_probs([0.1, 0.5, 4])
    of_token = torch.arange(3).repeat_interleave(sizes)
    q = (masses / sizes)[of_token]
    p = q * ratios[of_token]  # ascending ratios: prefixes are prefixes of the numbering
    held = torch.nn.functional.one_hot(of_token).cumsum(0).double()  # [V, 3] of each class in the prefix
    inside = torch.zeros_like(q)
    for classes in itertools.product(range(3), repeat=k):
        used = torch.zeros(3, dtype=torch.float64)
        probability = torch.ones_like(q)
        for c in classes:
            probability = probability * (held[:, c] - used[c]) * (masses / sizes)[c] / (1 - used @ (masses / sizes))
            used[c] += 1
        inside += probability
    best = (p.cumsum(0) + 1 - inside).min().clamp(max=1)
    assert best < 0.99
    close(compute_optimal_without_replacement(p[None], q[None], k)[0], best, 1e-9)


@pytest.mark.parametrize("name, k", [("rrs-wo", 2), ("rrs-wo", 3), ("is-lp:s=2", 3)])
def test_measured_rates_are_the_enumerated_one_to_five_standard_errors(name, k):
    rows = 200 if name == "rrs-wo" else 20
    generator = seeded(6)
    for p, q in every_pair(0):
        rate, error = measure_rate(
            scheme_by_name(name), p.expand(rows, -1), q.expand(rows, -1), k, generator, samples=32
        )
        error = error.square().sum().sqrt() / rows
        assert abs(rate.mean() - of_the_plan(name, p, q, k)) <= 5 * error + 1e-9


@pytest.mark.parametrize("name, k", [("rrs", 1), ("rrs", 2), ("rrs-wo", 2), ("greedy", 2)])
def test_the_bound_by_samples_of_draws_is_near_their_optimum_and_not_below(name, k):
    scheme = scheme_by_name(name)
    for p, q in every_pair(0)[::2]:
        found, error = bound_optimum(scheme, p[None], q[None], k, seeded(3), samples=1000)
        best = find_optimum(scheme, p[None], q[None], k)
        assert -5 * error - 1e-9 <= found - best <= 5 * error + 0.02
        few, error = bound_optimum(scheme, p.expand(40, -1), q.expand(40, -1), k, seeded(4), samples=8)
        assert few.mean() - best >= -5 * error.square().sum().sqrt() / 40 - 1e-9
