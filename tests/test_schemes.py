"""Every scheme is lossless: over all draws, Pr(draws) * plan sums to p. And `draw` follows the law it says."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from enumeration import (
    CASES,
    ENUMERABLE,
    LOSSLESS,
    SCHEMES,
    enumerate_plans,
    law,
    outcomes,
    random_law,
    scheme_by_name,
)
from scipy.stats import chisquare

from treespec.errors import InputError
from treespec.trees.tree import Draws
from treespec.verify import registry
from treespec.verify.is_lp import IsLp
from treespec.verify.topk import Typical

NAMES = [*ENUMERABLE, "is-lp:s=2", "is-lp:s=1", "is-lp:alphabet=2", "is-lp:s=2,alphabet=3"]
OPTIMAL = ["optimal", "optimal:exact=1"]
WITHOUT_REPLACEMENT = ["rrs-wo", "greedy", "spechub"]


def numbers_of_draws(name: str) -> list[int]:
    return list(range(1, (SCHEMES[name.split(":")[0]].max_draws or 3) + 1))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_output_law_is_the_target_law(name: str, case: str) -> None:
    p, q = map(law, CASES[case])
    for k in numbers_of_draws(name):
        [(output, _)] = enumerate_plans(scheme_by_name(name), p, q, [k])
        torch.testing.assert_close(output, p, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_output_law_is_the_target_law_for_random_laws(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(5 if "is-lp" in name else 40):
        p, q = random_law(5, generator), random_law(5, generator)
        for k in numbers_of_draws(name)[-2:]:
            [(output, _)] = enumerate_plans(scheme_by_name(name), p, q, [k])
            torch.testing.assert_close(output, p, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", ["plain", "one-hot q", "two supported"])
@pytest.mark.parametrize("name", NAMES)
def test_output_law_is_the_target_law_where_nodes_have_different_numbers_of_draws(name: str, case: str) -> None:
    p, q = map(law, CASES[case])
    for output, _ in enumerate_plans(scheme_by_name(name), p, q, numbers_of_draws(name)):
        torch.testing.assert_close(output, p, rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("rrs", "is-lp")) and name != "rrs-wo"])
def test_output_law_is_the_target_law_where_each_draw_has_its_own_law(name: str, k: int) -> None:
    p = law([0.1, 0.2, 0.3, 0.4])
    q = law([[0.4, 0.3, 0.2, 0.1], [0, 0.1, 0.2, 0.7], [0.5, 0, 0.5, 0]])
    [(output, _)] = enumerate_plans(scheme_by_name(name), p, q, [k])
    torch.testing.assert_close(output, p, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [*NAMES, *OPTIMAL])
def test_a_plan_depends_on_its_own_row_alone(name: str) -> None:
    """Other nodes' laws may depend on this node's draws. The laws here leave programs several optima."""
    scheme = scheme_by_name(name)
    generator = torch.Generator().manual_seed(2)
    p = torch.stack([law(CASES[case][0]) for case in CASES])
    q = torch.stack([law(CASES[case][1]) for case in CASES])
    draws = scheme.draw(q, numbers_of_draws(name)[-1], generator)
    together = scheme.plan(p, q, draws)
    for row in range(len(p)):
        own = slice(row, row + 1)
        alone = scheme.plan(p[own], q[own], draws.rows(own))
        torch.testing.assert_close(together[own], alone, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", [*NAMES, *OPTIMAL])
def test_without_draws_the_plan_is_p(name: str) -> None:
    p, q = (law(values)[None] for values in CASES["plain"])
    k = numbers_of_draws(name)[-1]
    absent = Draws(torch.full((1, k), -1))
    if name in OPTIMAL:
        absent = replace(absent, sure=torch.zeros(1, k, dtype=torch.bool), uniforms=torch.zeros(1, k, 2))
    torch.testing.assert_close(scheme_by_name(name).plan(p, q, absent), p, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_float32_plans_are_laws_where_rounding_leaves_no_residual(name: str) -> None:
    p = torch.tensor([[1.0, 0, 0], [1, 0, 0]])
    q = torch.tensor([[1.0, 1e-12, 1e-12], [1, 0, 1e-12]])  # sums to 1 in float32
    width = numbers_of_draws(name)[-1]
    tokens = torch.tensor([[1, 2, 0], [2, 0, -1]])[:, :width]
    if name == "greedy":
        tokens = torch.tensor([[0, 1, 2], [0, 2, -1]])
    plan = scheme_by_name(name).plan(p, q, Draws(tokens))
    assert plan.dtype == torch.float32
    torch.testing.assert_close(plan, p)


@pytest.mark.parametrize("name", [name for name in [*NAMES, *OPTIMAL, "typical"] if name != "otm-lp"])
def test_float32_plans_at_vocabulary_size_are_laws(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    scheme = scheme_by_name(name, allow_lossy=True)
    k = min(4, scheme.max_draws or 4)
    logits = 4 * torch.randn(4, 3000, generator=generator)
    q = logits.softmax(-1)
    p = (logits + torch.randn(4, 3000, generator=generator)).softmax(-1)
    p[0], q[1] = q[0], torch.eye(3000)[7]
    plan = scheme.plan(p, q, scheme.draw(q, k, generator))
    assert plan.dtype == torch.float32
    assert (plan >= 0).all()
    torch.testing.assert_close(plan.sum(-1), torch.ones(4), rtol=0, atol=1e-5)


def check_law(counts: Counter[tuple[int, ...]], expected: list[tuple[tuple[int, ...], float]]) -> None:
    """chi-squared at an error probability of 1e-6; cells that expect under 5 are one."""
    total = counts.total()
    assert counts.keys() <= {draws for draws, _ in expected}
    cells = [(counts[draws], total * probability) for draws, probability in expected]
    large = [cell for cell in cells if cell[1] >= 5]
    small = [cell for cell in cells if cell[1] < 5]
    if sum(e for _, e in small) >= 5:
        large.append((sum(c for c, _ in small), sum(e for _, e in small)))
    else:
        large[0] = (large[0][0] + sum(c for c, _ in small), large[0][1] + sum(e for _, e in small))
    if len(large) > 1:
        assert chisquare([c for c, _ in large], [e for _, e in large]).pvalue > 1e-6


@pytest.mark.parametrize("q", [[0.05, 0.4, 0, 0.35, 0.2], [0.7, 0, 0.3, 0, 0], [0, 0, 0, 1, 0]])
@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "optimal"])
def test_draws_follow_the_law_at_nodes_with_different_numbers_of_draws(name: str, q: list[float]) -> None:
    ks = torch.tensor(numbers_of_draws(name)).repeat(20_000)
    tokens = SCHEMES[name].draw(law(q).expand(len(ks), -1), ks, torch.Generator().manual_seed(4)).tokens
    assert tokens.shape == (len(ks), ks.max())
    for k in numbers_of_draws(name):
        assert (tokens[ks == k, k:] == -1).all()
        if not SCHEMES[name].deterministic or 0 not in q:
            check_law(Counter(map(tuple, tokens[ks == k, :k].tolist())), outcomes(name, law(q), k))


@pytest.mark.parametrize("name", ["rrs", "is-lp"])
def test_draws_follow_a_law_each(name: str) -> None:
    q = law([[0.4, 0.3, 0.2, 0.1], [0, 0.1, 0.2, 0.7]])
    tokens = SCHEMES[name].draw(q.expand(20_000, -1, -1), 2, torch.Generator().manual_seed(5)).tokens
    check_law(Counter(map(tuple, tokens.tolist())), outcomes(name, q, 2))


@pytest.mark.parametrize("name", WITHOUT_REPLACEMENT)
def test_draws_without_replacement_follow_the_law_of_a_tiny_rest(name: str) -> None:
    q = law([3e-13, 1 - 1e-12, 7e-13])
    tokens = SCHEMES[name].draw(q.expand(20_000, -1), 2, torch.Generator().manual_seed(6)).tokens
    check_law(Counter(map(tuple, tokens.tolist())), outcomes(name, q, 2))


def test_a_deterministic_draw_takes_scores_and_lists_the_best_first() -> None:
    scores = torch.tensor([[-3.0, 5, -1], [0, -9, 2]])
    tokens = SCHEMES["topk"].draw(scores, torch.tensor([4, 2]), torch.Generator()).tokens
    assert tokens.tolist() == [[1, 2, 0, -1], [2, 0, -1, -1]]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("best", ", ".join(registry.SCHEMES)),
        ("otm-lp", "does not decode: see its rates by treespec acceptance --verifier otm-lp"),
        ("is-lp:t=3", "unknown option 't'; its options are s, alphabet, draft-temperatures"),
        ("single:s=3", "it has no options"),
        ("is-lp:s=many", "s must be a whole number"),
        ("is-lp:s=", "s must be a whole number"),
        ("is-lp:s=0", "s is 0, must be a whole number from 1 to 256"),
        ("rrs:draft-temperatures=1/warm", "draft-temperatures must be numbers, such as 0.8/1.2"),
        ("rrs:draft-temperatures=1/0", "must be a number above 0"),
        ("is-lp:draft-temperatures=-1", "must be a number above 0"),
        ("optimal:threshold=0", "must be a number above 0 and at most 1"),
        ("optimal:threshold=nan", "must be a number above 0 and at most 1"),
        ("optimal:threshold=some", "threshold must be a number"),
        ("optimal:extra=2", "must be a whole number from 0 to 1"),
        ("optimal:exact=-1", "must be a whole number from 0 to 1"),
        ("typical:epsilon=few", "epsilon must be a number"),
        ("typical:delta=nan", "must be a number above 0 and at most 1"),
    ],
)
def test_an_unknown_scheme_or_option_is_named(spec: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        registry.scheme_by_name(spec, allow_lossy=True)
    assert words in str(error.value)


def test_options_have_the_type_of_their_field() -> None:
    assert scheme_by_name("is-lp:s=8,draft-temperatures=0.8/1") == IsLp(s=8, draft_temperatures=(0.8, 1.0))
    assert scheme_by_name("typical:epsilon=0.2", allow_lossy=True) == Typical(epsilon=0.2)


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in LOSSLESS])
def test_a_lossy_scheme_must_be_allowed(name: str) -> None:
    with pytest.raises(InputError, match="--allow-lossy"):
        scheme_by_name(name)
    assert scheme_by_name(name, allow_lossy=True) == SCHEMES[name]


def test_a_program_that_is_too_large_is_refused() -> None:
    q = torch.full((1, 100), 0.01)
    draws = Draws(torch.tensor([[1, 2, 3]]))
    with pytest.raises(InputError, match=r"3 draws of 100 tokens make 166750 sets.*take optimal"):
        SCHEMES["otm-lp"].plan(q, q, draws)
    one_hot = torch.eye(100)[:1]
    torch.testing.assert_close(SCHEMES["otm-lp"].plan(q, one_hot, Draws(torch.zeros_like(draws.tokens))), q)


@pytest.mark.parametrize("name", SCHEMES)
def test_what_a_scheme_cannot_draw_or_answer_is_refused(name: str) -> None:
    scheme, generator = SCHEMES[name], torch.Generator()
    q = torch.full((1, 5), 0.2)
    if scheme.max_draws:
        k = scheme.max_draws + 1
        with pytest.raises(InputError, match=f"at most {scheme.max_draws} draws"):
            scheme.draw(q, k, generator)
    own = q[:, None].expand(1, 2, 5)
    with pytest.raises(InputError, match="law"):
        scheme.draw(own, 3 if name in ("rrs", "is-lp") else 1, generator)
