"""`optimal` selects by the best distribution for its draws; and every scheme gives p at low temperature.

At low temperature what is left of q may be tiny. Distributions come from logits by `compute_probs`, as in use. The
output's distribution is exact over all draws: one on what is left of q is as likely as any other, however little that
is. Verifiers of whole trees: tests/test_tree_verifiers.py.
"""

import itertools
import math
from functools import cache

import pytest
import torch
from models import close, ones, rand, seeded
from reference import CASES, ENUMERABLE, list_draws, random_probs, scheme_by_name, to_probs
from scipy.stats import kstest, norm

from treespec.draft.tree_assembly import stack_draws
from treespec.sampling.probs import SamplingParams, compute_probs
from treespec.trees.tree import Draws
from treespec.verify import coupling
from treespec.verify.block_optimal import refuse_selected_first
from treespec.verify.distributions import draw_iid_children, drop_repeats, sum_mass_on
from treespec.verify.optimal import Optimal, build_selected_distribution
from treespec.verify.rates import compute_optimal_iid

KS = (1, 2, 3, 4, 5)
ERROR = 1e-4  # probability that a test of this file fails by chance, each
OPTIONS = [Optimal(threshold, extra, exact) for threshold in (0.35, 1) for extra in (0, 1) for exact in (0, 1)]


def random_distributions(number=10, vocabulary=6):
    """[B, V] p and q: all the cases, filled up with tokens of no mass, and random distributions."""
    generator = seeded(1)
    pairs = [[to_probs([*values, *[0] * (vocabulary - 4)]) for values in case] for case in CASES.values()]
    pairs += [[random_probs(vocabulary, generator) for _ in "pq"] for _ in range(number)]
    p, q = (torch.stack(rows) for rows in zip(*pairs, strict=True))
    return p, q


def common_distributions():
    """Some whose tokens all show up in a few hundred draws."""
    p, q = random_distributions()
    rows = ((q == 0) | (q > 0.03)).all(-1).nonzero().squeeze(1)[-5:]
    return p[rows], q[rows]


def realistic(rows, vocabulary, spread, power=1.3):
    """[B, V] p and q: Zipf's law, both with noise of their own."""
    generator = seeded(2)
    zipf = -power * torch.arange(1.0, vocabulary + 1, dtype=torch.float64).log()
    noise = torch.randn(3, rows, vocabulary, generator=generator, dtype=torch.float64)
    p, q = (zipf + noise[0] + spread * own for own in noise[1:])
    return p.softmax(-1), q.softmax(-1)


def couple(p, q, k, exact=1):
    """x [B, V], the cells of the tokens [B, V] and the coupling."""
    number = torch.full_like(q[:, :1], k, dtype=torch.int64)
    cell, coupled = Optimal(exact=exact).couple(p, q, number)
    return build_selected_distribution(q, number, cell, coupled), cell, coupled


def limit(tests):
    """Standard errors that this many z-tests stay below, but for ERROR."""
    return norm.isf(ERROR / (2 * tests))


@pytest.mark.parametrize("share", [1, 0.6])
@pytest.mark.parametrize("exact", [0, 1])
@pytest.mark.parametrize("k", KS)
def test_the_selected_distribution_is_one_that_draws_can_reach(k, exact, share):
    """Any selection has x(H) >= q(H)^K, as all draws may lie in H; for every H."""
    p, q = random_distributions()
    x, _, _ = couple(share * p, q, k, exact)
    assert (x >= 0).all()
    close(x.sum(-1), torch.ones(len(p), dtype=x.dtype), 1e-12)
    sets = torch.tensor(list(itertools.product([0.0, 1.0], repeat=p.shape[1])), dtype=p.dtype)
    assert (x @ sets.mT >= (q @ sets.mT) ** k - 1e-12).all()


@pytest.mark.parametrize("share", [1, 0.6])
@pytest.mark.parametrize("spread", [0.1, 0.5, 2])
@pytest.mark.parametrize("k", [2, 4, 8])
def test_the_selected_distribution_reaches_the_optimal_rate_on_realistic_logits(k, spread, share):
    """To 1e-9 where tokens are sorted, to 0.1 points where they are put into cells."""
    p, q = realistic(10, 2000, spread)
    best = compute_optimal_iid(share * p, q, k)
    for exact, error in ((1, 1e-9), (0, 1e-3)):
        x, _, _ = couple(share * p, q, k, exact)
        found = (share * p).minimum(x).sum(-1)
        assert (found <= best + 1e-9).all()
        assert (found >= best - error).all()


@pytest.mark.parametrize("mass", [0.5, 1e-3, 1e-6])
def test_cells_are_as_fine_where_little_of_the_draft_is_left(mass):
    """The rest of q after a sure token of 1 - mass, where p is spread otherwise; to 0.1 points."""
    p, q = realistic(10, 2000, 1, power=0.5)
    row = q[:, :1] * 0
    p = torch.cat([row + 0.3, 0.7 * p], dim=1)
    q = torch.cat([row + 1 - mass, mass * q], dim=1)
    rates = [Optimal(threshold=0.45, extra=0, exact=exact).acceptance_rate(p, q, 3) for exact in (0, 1)]
    close(*rates, 1e-3)
    best = 0.3 + compute_optimal_iid(p[:, 1:], q[:, 1:], 2)
    close(rates[1], best, 1e-9)


@pytest.mark.parametrize("exact", [0, 1])
@pytest.mark.parametrize("k", KS)
def test_scores_are_uniform_and_the_selected_token_has_its_distribution(k, exact):
    """By Kolmogorov and Smirnov, and each token's frequency by a z-test."""
    draws = 40_000
    generator = seeded(4)
    for _ in range(3):
        p = random_probs(6, generator)[None]
        q = random_probs(6, generator)[None]
        tokens = draw_iid_children(q, draws * k, generator)
        place, coin = torch.rand(2, 1, draws * k, generator=generator, dtype=q.dtype)
        x, cell, coupled = couple(p, q, k, exact)
        scores = coupling.score_draws(coupled, cell.gather(1, tokens), place, coin).view(-1, k)
        selected = tokens.view(-1, k).gather(1, scores.argmax(-1, keepdim=True)).flatten()
        off = selected.bincount(minlength=6) / draws - x[0]
        assert kstest(scores.flatten().numpy(), "uniform").pvalue > ERROR / 6
        assert (off.abs() <= limit(36) * (x[0] * (1 - x[0]) / draws).sqrt() + 1e-12).all()


def sampled_plans(scheme, p, q, asked, draws):
    """[B, draws, V] plans and [B, draws] their mass on the draws. asked: draws a node."""
    p, q = (rows.repeat_interleave(draws, 0) for rows in (p, q))
    drawn = scheme.draw(q, asked, seeded(5))
    plan = scheme.plan(p, q, drawn)
    assert (plan >= 0).all()
    assert (plan.sum(-1) - 1).abs().max() < 4500 * torch.finfo(plan.dtype).eps
    shape = (-1, draws, p.shape[1])
    return plan.double().view(shape), sum_mass_on(plan, drawn.tokens).view(shape[:2])


def off(samples, wanted, noise=1e-11):
    """How far the means of samples [B, draws, ...] lie off, in standard errors."""
    return (samples.mean(1) - wanted) / (samples.std(1) / math.sqrt(samples.shape[1]) + noise)


@pytest.mark.parametrize("scheme", OPTIONS)
def test_the_mean_plan_is_p_and_its_rate_the_stated_one(scheme):
    p, q = random_distributions() if scheme.exact else common_distributions()  # cells cost too much for many draws
    plans, rates = sampled_plans(scheme, p, q, 3, 1000 if scheme.exact else 200)
    assert off(plans, p).abs().max() < limit(p.numel())
    in_rate = off(rates, scheme.acceptance_rate(p, q, 3))
    assert in_rate.min() > (-limit(len(p)) if scheme.exact else -4)
    assert not scheme.exact or in_rate.max() < limit(len(p))


@pytest.mark.parametrize("scheme", OPTIONS)
def test_the_mean_output_of_a_node_of_weight_w_is_w_p(scheme):
    """By block verification, where draws are leaves: each is accepted in its turn, and in the end the node itself."""
    p, q = common_distributions()
    for weight in (1.0, 0.4):
        many, drafts = (rows.repeat_interleave(400, 0) for rows in (p, q))
        drawn = scheme.draw(drafts, 3, seeded(6))
        drawn = drawn.select_columns(drawn.sure.int().argsort(stable=True))
        *draws, (last, rest, _) = refuse_selected_first(
            scheme, many, drafts, drawn, torch.full_like(many[:, :1], weight)
        )
        reach = torch.ones_like(last)
        output = torch.zeros_like(many)
        for token, (accepted, _, _) in zip(drawn.tokens.split(1, 1), draws, strict=True):
            output.scatter_add_(1, token.clamp(min=0), reach * accepted)
            reach = reach * (1 - accepted)
        output += reach * last * rest / rest.sum(-1, keepdim=True).clamp(min=1e-300)
        assert off(output.view(len(p), 400, -1), weight * p).abs().max() < limit(2 * p.numel())


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_the_first_draws_are_distinct_and_nearly_as_many_as_requested(k):
    _, q = realistic(500, 2000, 0.7)
    drawn = Optimal().draw(q, k, seeded(8))
    for row in drawn.tokens[:, :k].tolist():
        assert len({*row} - {-1}) == k - row.count(-1)
    numbers = [len({*row} - {-1}) for row in drawn.tokens.tolist()]
    assert abs(sum(numbers) / len(numbers) - k) < 0.6
    without_extra = Optimal(extra=0).draw(q, k, seeded(8)).tokens
    assert ((without_extra >= 0).sum(-1) == k).all()


def test_many_equal_masses_in_float32_keep_the_cells_exact():
    """Sums in float32 would put the masses of the cells off by 3e-4."""
    q = torch.full((1, 150_000), 1 / 150_000, dtype=torch.float32)
    p = torch.where(torch.arange(150_000) < 40_000, 2.0, 1.0)[None] / 190_000
    _, _, coupled = couple(p, q, 2, exact=0)
    [least] = coupled.edges.unique()[[1]].tolist()
    assert least == pytest.approx(11 / 15, rel=0, abs=1e-9)


# The draft's second token is as unlikely as float32 can say: 4.75 / .05 = 95, exp(-95) = 5e-42.
EXAMPLE = [0.0, 10.0, 10.05, 10.05], [10.0, 5.25, 5.2, 5.15]
TEMPERATURES = (0.01, 0.02, 0.05, 0.1, 0.3, 0.7, 1.0, 2.0)
SPREADS = (5.0, 10.0, 20.0)
# A plan's few sums and products of numbers up to 1 round by some 2^-24 each, 6e-8; in float64 by 2^-53.
EXACT = {torch.float32: 2e-6, torch.float64: 1e-12}
# Of logits over T, between the draft's largest and the others: normal, subnormal, and 0 probabilities.
GAPS = {torch.float32: (80, 87, 88, 92, 97, 103, 106), torch.float64: (700, 708, 712, 725, 740, 744, 750)}
NAMES = [*ENUMERABLE, "is-lp:s=2"]


@cache
def logits(dtype):
    """[B, V] of target and draft: the example, random ones of each spread, and drafts with each gap."""
    generator = seeded(0)
    rows = [torch.tensor(EXAMPLE)]
    for spread in SPREADS:
        rows += [spread * rand(2, 4, generator=generator) for _ in range(4)]
    for temperature in (0.02, 0.05):
        for gap in GAPS[dtype]:
            target, draft = 5 * temperature * rand(2, 4, generator=generator)
            draft[gap % 4] += gap * temperature
            rows.append(torch.stack([target, draft]))
    return torch.stack(rows, 1).to(dtype)


def unit(rows):
    return rows.double() / rows.double().sum(-1, keepdim=True)


def all_draws(name, q, k):
    """Of one node, and their chances by q [V] to the last digit."""
    found = list_draws(name, unit(q), k)
    return Draws(torch.tensor([tokens for tokens, _ in found])), to_probs([chance for _, chance in found])


def check(scheme, p, q, draws):
    """draws: of each row all there are and their chances. The mean of their plans is p."""
    rows = torch.arange(len(p)).repeat_interleave(torch.tensor([len(chances) for _, chances in draws]))
    plan = scheme.plan(p[rows], q[rows], stack_draws([one for one, _ in draws]))
    assert plan.dtype == p.dtype
    assert (plan >= 0).all()
    assert (plan.sum(-1) - 1).abs().max() < 10 * EXACT[p.dtype]
    chances = torch.cat([chances for _, chances in draws])
    output = torch.zeros(p.shape, dtype=torch.float64).index_add_(0, rows, chances[:, None] * plan.double())
    close(output, unit(p), EXACT[p.dtype])


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("name", NAMES)
def test_every_scheme_gives_the_targets_distribution_at_every_temperature(name, dtype):
    scheme = scheme_by_name(name)
    for temperature in TEMPERATURES:
        params = SamplingParams(temperature)
        p, q = compute_probs(logits(dtype), params)
        for k in range(1, (scheme.max_draws or 3) + 1):
            check(scheme, p, q, [all_draws(scheme.name, row, k) for row in q])


@pytest.mark.parametrize("scheme", [Optimal(), Optimal(exact=1), Optimal(extra=0, exact=1)])
def test_the_mean_plan_of_optimal_is_the_targets_distribution(scheme):
    """Its draws carry uniforms, so they are sampled: a test fails by chance with 1e-4."""
    for temperature in (0.02, 0.05):
        p, q = compute_probs(logits(torch.float32), SamplingParams(temperature))
        plans, _ = sampled_plans(scheme, p, q, 3, 60)
        assert off(plans, unit(p), EXACT[torch.float32]).abs().max() < limit(p.numel())


def test_float32_probabilities_differ_from_float64_only_by_rounding_of_logits():
    """A logit of z / T is off by half a bit of it, and so is the log of a probability, twice."""
    for temperature in TEMPERATURES:
        single, double = (compute_probs(logits(dtype)[0], SamplingParams(temperature)) for dtype in EXACT)
        off = 2.0**-23 * (max(SPREADS) / temperature + 10)
        close(single.double(), double, 1e-37, off)


@pytest.mark.parametrize("name", NAMES)
def test_subnormal_masses_never_give_a_plan_that_does_not_sum_to_1(name):
    """As they come where `compute_probs` is not asked; nor do draws that only rounding makes possible."""
    generator = seeded(0)
    gaps = 104 * rand(2, 500, 5, generator=generator) ** 0.3
    p, q = (-gaps * (rand(gaps.shape, generator=generator) < 0.8)).softmax(-1)
    q[::5] = p[::5]
    for k in range(1, (scheme_by_name(name).max_draws or 4) + 1):
        tokens = rand(q.shape, generator=generator).argsort(-1)[:, :k]
        if name in ("spechub", "greedy"):
            tokens[:, -1:] = q.argmax(-1, keepdim=True)
            tokens = drop_repeats(tokens)
        plan = scheme_by_name(name).plan(p, q, Draws(tokens))
        assert (plan >= 0).all()
        close(plan.sum(-1), ones(len(p)), 1e-5)
