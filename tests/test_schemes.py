"""Every scheme is lossless: over all draws, Pr(draws) * plan sums to p. And `draw` follows its distribution."""

import math
from dataclasses import replace

import faults
import pytest
import torch
from commands import complains
from models import close, ones, randn, seeded
from reference import (
    CASES,
    ENUMERABLE,
    LOSSLESS,
    SCHEMES,
    deviation,
    enumerate_plans,
    enumerate_runs,
    every_pair,
    list_draws,
    scheme_by_name,
    to_probs,
)

from treespec.trees.tree import Draws
from treespec.verify import distributions, is_lp, kseq, rrs, single, spechub
from treespec.verify.topk import TopK, Typical

NAMES = [*ENUMERABLE, "is-lp:s=2", "is-lp:s=1"]
OPTIMAL = ["optimal", "optimal:exact=1"]


def numbers_of_draws(name):
    return list(range(1, (SCHEMES[name.split(":")[0]].max_draws or 3) + 1))


@pytest.mark.parametrize("name", NAMES)
def test_the_output_distribution_is_the_targets(name):
    """With every number of draws alone, and at nodes of one batch that have different numbers."""
    for p, q in every_pair(5 if "is-lp" in name else 20):
        for numbers in (numbers_of_draws(name), *([k] for k in numbers_of_draws(name))):
            for output, _ in enumerate_plans(scheme_by_name(name), p, q, numbers):
                close(output, p, 1e-12)


@pytest.mark.parametrize("name", [*NAMES, *OPTIMAL])
def test_a_plan_depends_only_on_its_row_and_without_draws_is_p(name):
    """Other nodes' distributions may depend on this node's draws. Those here leave programs several optima."""
    scheme = scheme_by_name(name)
    p, q = (torch.stack([to_probs(case[side]) for case in CASES.values()]) for side in (0, 1))
    draws = scheme.draw(q, numbers_of_draws(name)[-1], seeded(2))
    together = scheme.plan(p, q, draws)
    for row in range(len(p)):
        own = slice(row, row + 1)
        close(together[own], scheme.plan(p[own], q[own], draws.select_rows(own)), 1e-15)
    absent = replace(draws, tokens=torch.full_like(draws.tokens, -1))
    if draws.sure is not None:
        absent = replace(absent, sure=torch.zeros_like(draws.sure))
    close(scheme.plan(p, q, absent), p, 1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_float32_plans_sum_to_1_where_rounding_leaves_no_residual(name):
    p = torch.tensor([[1.0, 0, 0], [1, 0, 0]], dtype=torch.float32)
    q = torch.tensor([[1.0, 1e-12, 1e-12], [1, 0, 1e-12]], dtype=torch.float32)  # sums to 1 in float32
    tokens = torch.tensor([[1, 2, 0], [2, 0, -1]])[:, : numbers_of_draws(name)[-1]]
    if name == "greedy":
        tokens = torch.tensor([[0, 1, 2], [0, 2, -1]])
    plan = scheme_by_name(name).plan(p, q, Draws(tokens))
    assert plan.dtype == torch.float32
    torch.testing.assert_close(plan, p)


@pytest.mark.parametrize("name", [*NAMES, *OPTIMAL, "typical"])
def test_float32_plans_at_vocabulary_size_sum_to_1(name):
    generator = seeded(3)
    scheme = scheme_by_name(name, allow_lossy=True)
    logits = 4 * randn(4, 3000, generator=generator)
    q = logits.softmax(-1)
    p = (logits + randn(4, 3000, generator=generator)).softmax(-1)
    p[0], q[1] = q[0], torch.eye(3000, dtype=torch.float32)[7]
    plan = scheme.plan(p, q, scheme.draw(q, min(4, scheme.max_draws or 4), generator))
    assert plan.dtype == torch.float32
    assert (plan >= 0).all()
    close(plan.sum(-1), ones(4), 1e-5)


@pytest.mark.parametrize("q", [[0.05, 0.4, 0, 0.35, 0.2], [0.7, 0, 0.3, 0, 0], [3e-13, 1 - 1e-12, 7e-13]])
@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "optimal"])
def test_draws_follow_the_enumerated_distribution(name, q):
    """Also where one draw takes nearly all of q. test_certify_tests.py has the generator's draws."""
    for k in numbers_of_draws(name):
        if not SCHEMES[name].deterministic or 0 not in q:
            found = enumerate_runs(
                lambda oracle, k=k: (*SCHEMES[name].draw(to_probs(q)[None], k, oracle).tokens[0].tolist(),)
            )
            assert deviation(found, dict(list_draws(name, to_probs(q), k))) < 1e-9


def test_a_deterministic_draw_takes_scores_and_lists_the_best_first():
    scores = torch.tensor([[-3.0, 5, -1], [0, -9, 2]], dtype=torch.float32)
    tokens = SCHEMES["topk"].draw(scores, torch.tensor([4, 2]), torch.Generator()).tokens
    assert tokens.tolist() == [[1, 2, 0, -1], [2, 0, -1, -1]]


BROKEN_RULES = [  # scheme, draws, the module or class that is changed, its function, and the fault in its place
    ("single", 1, distributions, distributions.subtract, faults.keep_refused_mass),
    ("rrs", 2, distributions, distributions.subtract, faults.keep_refused_mass),
    ("rrs-wo", 2, rrs, rrs.iterate_remaining_q, faults.forget_earlier_draws),
    ("kseq", 3, kseq, kseq.subtract, faults.subtract_all_that_drafts_share),
    ("spechub", 2, spechub, spechub.scale, faults.leave_unnormalised),
    ("greedy", 2, single, single.mask_out, faults.keep_top_tokens),
    ("is-lp", 2, is_lp, is_lp.solve_pair_rule, faults.expect_the_lower_rank),
    ("is-lp", 3, is_lp, is_lp.select, faults.forget_the_winner),
    ("topk", 2, TopK, TopK.plan, faults.plan_the_token_before),
]


@pytest.mark.parametrize("name, k, owner, original, fault", BROKEN_RULES)
def test_a_broken_rule_gives_another_distribution(monkeypatch, name, k, owner, original, fault):
    faults.plant(monkeypatch, owner, original, fault)
    worst = 0.0
    for p, q in every_pair(4, 4):
        tokens, chances = zip(*list_draws(name, q, k), strict=True)
        rows = len(chances)
        plan = SCHEMES[name].plan(p.expand(rows, -1), q.expand(rows, -1), Draws(torch.tensor(tokens)))
        worst = max(worst, float((to_probs(chances) @ plan - p).abs().max()))
    assert worst > 1e-6
    assert {rule[0] for rule in BROKEN_RULES} == {*LOSSLESS} - {"optimal"}


@pytest.mark.parametrize("name", ["single", "rrs", "rrs-wo", "kseq", "greedy", "spechub"])
def test_masses_that_do_not_sum_to_1_are_normalised(name):
    p, q = map(to_probs, CASES["plain"])
    draws, chances = zip(*list_draws(name, q, min(2, SCHEMES[name].max_draws or 2)), strict=True)
    plan = SCHEMES[name].plan(p.expand(len(draws), -1), q.expand(len(draws), -1) / 2, Draws(torch.tensor(draws)))
    close(to_probs(chances) @ plan, p, 1e-12)


@pytest.mark.parametrize("name", SCHEMES)
def test_what_a_scheme_cannot_draw_or_answer_is_refused(name):
    scheme = SCHEMES[name]
    generator = torch.Generator()
    q = torch.full((1, 5), 0.2, dtype=torch.float32)
    if scheme.max_draws:
        with complains(f"at most {scheme.max_draws} draws"):
            scheme.draw(q, scheme.max_draws + 1, generator)


@pytest.mark.parametrize(
    "p, draws, output",
    [
        ([0.5, 0.3, 0.15, 0.05], [1, 2], 1),  # threshold .09: both pass, 1 is likelier
        ([0.5, 0.3, 0.15, 0.05], [2, 1], 1),  # in any order
        ([0.5, 0.3, 0.15, 0.05], [3, 2], 2),  # 3 does not pass
        ([0.5, 0.3, 0.15, 0.05], [3, -1], None),  # none passes
        ([0.5, 0.3, 0.15, 0.05], [-1, 2], 2),
        ([0.91, 0.09, 0, 0], [1, 2], None),  # the threshold itself does not pass
        ([0.25, 0.25, 0.25, 0.25], [3, 3], 3),  # threshold .3 / 4
        ([1, 0, 0, 0], [1, 2], None),
        ([1, 0, 0, 0], [1, 0], 0),
    ],
)
def test_the_most_likely_draw_above_the_threshold_is_output(p, draws, output):
    row = to_probs(p)[None]
    plan = Typical().plan(row, row, Draws(torch.tensor([draws])))
    torch.testing.assert_close(plan, row if output is None else torch.eye(4, dtype=row.dtype)[[output]])


def test_the_threshold_falls_with_the_entropy():
    p = torch.stack([to_probs([0.05] * 20), to_probs([0.5, 0.5] + [0] * 18), to_probs([0.9] + [0.1 / 19] * 19)])
    entropy = 0.9 * math.log(1 / 0.9) + 0.1 * math.log(190)
    assert Typical().compute_threshold(p).squeeze(1).tolist() == pytest.approx([0.015, 0.09, 0.09])
    threshold = Typical(epsilon=1, delta=0.5).compute_threshold(p).squeeze(1).tolist()
    assert threshold == pytest.approx([0.025, 0.25, 0.5 * math.exp(-entropy)])
