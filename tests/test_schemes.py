"""Every scheme is lossless: over all draws, Pr(draws) * plan sums to p. And `draw` follows the law it says."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from enumeration import (
    CASES,
    ENUMERABLE,
    LOSSLESS,
    SCHEMES,
    enumerate_plans,
    every_pair,
    law,
    outcomes,
    scheme_by_name,
)
from equality import close, seeded
from mutants import mutant
from oracle import chances_of, deviation
from refusals import complains

from treespec.trees.tree import Draws
from treespec.verify import distributions, is_lp, kseq, rrs, single, spechub, topk
from treespec.verify.topk import Typical

NAMES = [*ENUMERABLE, "is-lp:s=2", "is-lp:s=1"]
OPTIMAL = ["optimal", "optimal:exact=1"]


def numbers_of_draws(name):
    return list(range(1, (SCHEMES[name.split(":")[0]].max_draws or 3) + 1))


@pytest.mark.parametrize("name", NAMES)
def test_output_law_is_the_target_law(name):
    """With every number of draws alone, and at nodes of one batch that have different numbers."""
    for p, q in every_pair(5 if "is-lp" in name else 20):
        for numbers in (numbers_of_draws(name), *([k] for k in numbers_of_draws(name))):
            for output, _ in enumerate_plans(scheme_by_name(name), p, q, numbers):
                close(output, p, 1e-12)


@pytest.mark.parametrize("name", [*NAMES, *OPTIMAL])
def test_a_plan_depends_on_its_own_row_alone_and_is_p_without_draws(name):
    """Other nodes' laws may depend on this node's draws. The laws here leave programs several optima."""
    scheme = scheme_by_name(name)
    p, q = (torch.stack([law(case[side]) for case in CASES.values()]) for side in (0, 1))
    draws = scheme.draw(q, numbers_of_draws(name)[-1], seeded(2))
    together = scheme.plan(p, q, draws)
    for row in range(len(p)):
        own = slice(row, row + 1)
        close(together[own], scheme.plan(p[own], q[own], draws.rows(own)), 1e-15)
    absent = replace(draws, tokens=torch.full_like(draws.tokens, -1))
    if draws.sure is not None:
        absent = replace(absent, sure=torch.zeros_like(draws.sure))
    close(scheme.plan(p, q, absent), p, 1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_float32_plans_are_laws_where_rounding_leaves_no_residual(name):
    p = torch.tensor([[1.0, 0, 0], [1, 0, 0]])
    q = torch.tensor([[1.0, 1e-12, 1e-12], [1, 0, 1e-12]])  # sums to 1 in float32
    tokens = torch.tensor([[1, 2, 0], [2, 0, -1]])[:, : numbers_of_draws(name)[-1]]
    if name == "greedy":
        tokens = torch.tensor([[0, 1, 2], [0, 2, -1]])
    plan = scheme_by_name(name).plan(p, q, Draws(tokens))
    assert plan.dtype == torch.float32
    torch.testing.assert_close(plan, p)


@pytest.mark.parametrize("name", [*NAMES, *OPTIMAL, "typical"])
def test_float32_plans_at_vocabulary_size_are_laws(name):
    generator = seeded(3)
    scheme = scheme_by_name(name, allow_lossy=True)
    logits = 4 * torch.randn(4, 3000, generator=generator)
    q = logits.softmax(-1)
    p = (logits + torch.randn(4, 3000, generator=generator)).softmax(-1)
    p[0], q[1] = q[0], torch.eye(3000)[7]
    plan = scheme.plan(p, q, scheme.draw(q, min(4, scheme.max_draws or 4), generator))
    assert plan.dtype == torch.float32
    assert (plan >= 0).all()
    close(plan.sum(-1), torch.ones(4), 1e-5)


@pytest.mark.parametrize("q", [[0.05, 0.4, 0, 0.35, 0.2], [0.7, 0, 0.3, 0, 0], [3e-13, 1 - 1e-12, 7e-13]])
@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "optimal"])
def test_draws_follow_the_law_that_is_enumerated(name, q):
    """Also where one draw takes nearly all of q. test_certify_tests.py has the generator's draws."""
    for k in numbers_of_draws(name):
        if not SCHEMES[name].deterministic or 0 not in q:
            found = chances_of(lambda oracle, k=k: (*SCHEMES[name].draw(law(q)[None], k, oracle).tokens[0].tolist(),))
            assert deviation(found, dict(outcomes(name, law(q), k))) < 1e-9


def test_a_deterministic_draw_takes_scores_and_lists_the_best_first():
    scores = torch.tensor([[-3.0, 5, -1], [0, -9, 2]])
    tokens = SCHEMES["topk"].draw(scores, torch.tensor([4, 2]), torch.Generator()).tokens
    assert tokens.tolist() == [[1, 2, 0, -1], [2, 0, -1, -1]]


MUTATIONS = [  # scheme, draws, the module that is changed, what stands there, and what stands there instead
    ("single", 1, distributions, "accepted, subtract(p, q, weight)", "accepted, p.clone()"),
    ("rrs", 2, distributions, "left = subtract(left, q, weight)", "left = left.clone()"),
    ("rrs-wo", 2, rrs, "q = without(q, token)", "q = q.clone()"),
    ("kseq", 3, kseq, "subtract(p, both, paid.to(p.dtype))", "subtract(p, both, torch.ones_like(beta))"),
    ("spechub", 2, spechub, "(q_a * scale(second_top, pair))", "q_a"),
    ("greedy", 2, single, "without(q, draws.tokens.scatter(1, last, -1))", "q"),
    ("is-lp", 2, is_lp, "(wins * pairs).sum(-1)", "pairs.triu().sum(-1)"),
    ("is-lp", 3, is_lp, "selected = new.selected.where(present, selected)", "selected = selected.clone()"),
    ("topk", 2, topk, "return p\n", "return p.roll(1, -1)\n"),
]


@pytest.mark.parametrize("name, k, part, old, new", MUTATIONS)
def test_a_broken_rule_has_another_law(name, k, part, old, new):
    module = sys.modules[type(SCHEMES[name]).__module__]
    broken = vars(mutant(module, (old, new), part=part))[type(SCHEMES[name]).__name__]()
    worst = 0.0
    for p, q in every_pair(4, 4):
        plans, chances = zip(*outcomes(name, q, k), strict=True)
        rows = len(chances)
        plan = broken.plan(p.expand(rows, -1), q.expand(rows, -1), Draws(torch.tensor(plans)))
        worst = max(worst, float((law(chances) @ plan - p).abs().max()))
    assert worst > 1e-6
    assert {mutation[0] for mutation in MUTATIONS} == {*LOSSLESS} - {"optimal"}


@pytest.mark.parametrize("name", ["single", "rrs", "rrs-wo", "kseq", "greedy", "spechub"])
def test_masses_that_do_not_sum_to_1_are_normalised(name):
    p, q = map(law, CASES["plain"])
    draws, chances = zip(*outcomes(name, q, min(2, SCHEMES[name].max_draws or 2)), strict=True)
    plan = SCHEMES[name].plan(p.expand(len(draws), -1), q.expand(len(draws), -1) / 2, Draws(torch.tensor(draws)))
    close(law(chances) @ plan, p, 1e-12)


@pytest.mark.parametrize("name", SCHEMES)
def test_what_a_scheme_cannot_draw_or_answer_is_refused(name):
    scheme = SCHEMES[name]
    generator = torch.Generator()
    q = torch.full((1, 5), 0.2)
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
def test_the_likeliest_draw_above_the_threshold_is_output(p, draws, output):
    row = law(p)[None]
    plan = Typical().plan(row, row, Draws(torch.tensor([draws])))
    torch.testing.assert_close(plan, row if output is None else torch.eye(4, dtype=row.dtype)[[output]])


def test_the_threshold_falls_with_the_entropy():
    p = torch.stack([law([0.05] * 20), law([0.5, 0.5] + [0] * 18), law([0.9] + [0.1 / 19] * 19)])
    entropy = 0.9 * math.log(1 / 0.9) + 0.1 * math.log(190)
    assert Typical().threshold(p).squeeze(1).tolist() == pytest.approx([0.015, 0.09, 0.09])
    threshold = Typical(epsilon=1, delta=0.5).threshold(p).squeeze(1).tolist()
    assert threshold == pytest.approx([0.025, 0.25, 0.5 * math.exp(-entropy)])
