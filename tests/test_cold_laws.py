"""At low temperature what is left of q may be tiny: every scheme gives p all the same, in float32 and in float64.

Laws come from logits by `probs`, as in use. The output's law is exact over all draws, of which one on what is left of
q is as likely as any other, however little that is. Verifiers of whole trees: tests/test_tree_verifiers.py.
"""

from functools import cache

import pytest
import torch
from enumeration import ENUMERABLE, law, outcomes, scheme_by_name
from equality import close, seeded
from test_optimal import limit, off, sampled_plans

from treespec.draft.tree_assembly import stack
from treespec.sampling.probs import SamplingParams, probs
from treespec.trees.tree import Draws
from treespec.verify.distributions import distinct
from treespec.verify.optimal import Optimal

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
        rows += [spread * torch.rand(2, 4, generator=generator) for _ in range(4)]
    for temperature in (0.02, 0.05):
        for gap in GAPS[dtype]:
            target, draft = 5 * temperature * torch.rand(2, 4, generator=generator)
            draft[gap % 4] += gap * temperature
            rows.append(torch.stack([target, draft]))
    return torch.stack(rows, 1).to(dtype)


def unit(rows):
    return rows.double() / rows.double().sum(-1, keepdim=True)


def all_draws(name, q, k):
    """Of one node, and their chances by q [V] to the last digit."""
    found = outcomes(name, unit(q), k)
    return Draws(torch.tensor([tokens for tokens, _ in found])), law([chance for _, chance in found])


def check(scheme, p, q, draws):
    """draws: of each row all there are and their chances. The mean of their plans is p."""
    rows = torch.arange(len(p)).repeat_interleave(torch.tensor([len(chances) for _, chances in draws]))
    plan = scheme.plan(p[rows], q[rows], stack([one for one, _ in draws]))
    assert plan.dtype == p.dtype
    assert (plan >= 0).all()
    assert (plan.sum(-1) - 1).abs().max() < 10 * EXACT[p.dtype]
    chances = torch.cat([chances for _, chances in draws])
    output = torch.zeros(p.shape, dtype=torch.float64).index_add_(0, rows, chances[:, None] * plan.double())
    close(output, unit(p), EXACT[p.dtype])


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("name", NAMES)
def test_every_scheme_gives_the_targets_law_at_every_temperature(name, dtype):
    scheme = scheme_by_name(name)
    for temperature in TEMPERATURES:
        params = SamplingParams(temperature)
        p, q = probs(logits(dtype), params)
        for k in range(1, (scheme.max_draws or 3) + 1):
            check(scheme, p, q, [all_draws(scheme.name, row, k) for row in q])


@pytest.mark.parametrize("scheme", [Optimal(), Optimal(exact=1), Optimal(extra=0, exact=1)])
def test_the_mean_plan_of_optimal_is_the_targets_law(scheme):
    """Its draws carry uniforms, so they are sampled: a test fails by chance with 1e-4."""
    for temperature in (0.02, 0.05):
        p, q = probs(logits(torch.float32), SamplingParams(temperature))
        plans, _ = sampled_plans(scheme, p, q, 3, 60)
        assert off(plans, unit(p), EXACT[torch.float32]).abs().max() < limit(p.numel())


def test_float32_laws_are_those_of_float64_but_for_the_rounding_of_the_logits():
    """A logit of z / T is off by half a bit of it, and so is the log of a probability, twice."""
    for temperature in TEMPERATURES:
        single, double = (probs(logits(dtype)[0], SamplingParams(temperature)) for dtype in EXACT)
        off = 2.0**-23 * (max(SPREADS) / temperature + 10)
        close(single.double(), double, 1e-37, off)


@pytest.mark.parametrize("name", NAMES)
def test_subnormal_masses_never_give_a_plan_that_is_no_law(name):
    """As they come where `probs` is not asked; nor do draws that only rounding makes possible."""
    generator = seeded(0)
    gaps = 104 * torch.rand(2, 500, 5, generator=generator) ** 0.3
    p, q = (-gaps * (torch.rand(gaps.shape, generator=generator) < 0.8)).softmax(-1)
    q[::5] = p[::5]
    for k in range(1, (scheme_by_name(name).max_draws or 4) + 1):
        tokens = torch.rand(q.shape, generator=generator).argsort(-1)[:, :k]
        if name in ("spechub", "greedy"):
            tokens[:, -1:] = q.argmax(-1, keepdim=True)
            tokens = distinct(tokens)
        plan = scheme_by_name(name).plan(p, q, Draws(tokens))
        assert (plan >= 0).all()
        close(plan.sum(-1), torch.ones(len(p)), 1e-5)
