"""The sum over draws of Pr(draws) * plan is p, and is not once a rule is broken: the tests of a law would notice.

The mutants of `optimal`, and of block, traversal and layer verification, are in the tests of those.
"""

import sys
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from enumeration import CASES, LOSSLESS, SCHEMES, Outcome, law, outcomes, random_law, sequential
from mutants import mutant
from scipy.stats import chisquare
from torch import Tensor

from treespec.eval.acceptance import otm_lp
from treespec.shaping import sampling
from treespec.shaping.sampling import SamplingParams, probs
from treespec.trees.tree import Drafts, Draws, TokenTree
from treespec.verify import greedy, is_lp, kseq, laws, rrs, spechub, topk
from treespec.verify.scheme import Scheme
from treespec.verify.walk import Walk

EXACT, WRONG = 1e-12, 1e-6


def output(scheme: Scheme, p: Tensor, q: Tensor, found: list[Outcome], sure: Tensor | None = None) -> Tensor:
    """[V] the law of the output over the draws. p: [V]; q: [V] or [K, V], as the plan is told; sure: [K] bool."""
    draws, weights = zip(*found, strict=True)
    rows = len(draws)
    own = None if sure is None else sure.expand(rows, -1)
    plan = scheme.plan(p.expand(rows, -1), q.expand(rows, *q.shape), Draws(torch.tensor(draws), own))
    return torch.tensor(weights, dtype=p.dtype) @ plan


def deviation(p: Tensor, other: Tensor) -> float:
    return (p - other).abs().max().item()


def pairs() -> list[tuple[Tensor, ...]]:
    """p and q, [V] each: some of the cases, and laws at random."""
    generator = torch.Generator().manual_seed(1)
    cases = [tuple(map(law, CASES[case])) for case in ("plain", "zeros in p", "ties in p/q", "two supported")]
    return [*cases, *[tuple(random_law(4, generator) for _ in "pq") for _ in range(4)]]


def worst(scheme: Scheme, k: int, each: bool) -> float:
    """The largest deviation of the output's law from p. each: every draw has a law of its own."""
    laws_of = law([[0.4, 0.3, 0.2, 0.1], [0, 0.1, 0.2, 0.7], [0.5, 0, 0.5, 0]])
    found = [(p, laws_of[:k] if each else q) for p, q in pairs()]
    return max(deviation(output(scheme, p, q, outcomes(scheme.name, q, k)), p) for p, q in found)


def scheme_in(module: ModuleType, name: str) -> Scheme:
    return vars(module)[type(SCHEMES[name]).__name__]()


def module_of(name: str) -> ModuleType:
    return sys.modules[type(SCHEMES[name]).__module__]


class Mutation(NamedTuple):
    """In `part`, `new` stands for `old`. each: shown by draws that have a law each."""

    scheme: str
    k: int
    what: str
    part: ModuleType
    old: str
    new: str
    each: bool = False


DIVIDED = ("present / q.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)", "present.to(q.dtype)")
LAST = "draws.tokens.scatter(1, last, -1)"
TWICE = """accepted = torch.zeros_like(p).scatter(1, draws.tokens, p.gather(1, draws.tokens))
        return accepted + (1 - accepted.sum(-1, keepdim=True)) * p\n"""

MUTATIONS = [
    Mutation("single", 1, "residual p", laws, "accepted, subtract(p, q, weight)", "accepted, p.clone()"),
    Mutation("single", 1, "always accepted", laws, ".clamp(max=1)", ".clamp(min=1, max=1)"),
    Mutation("rrs", 2, "residual not taken", laws, "left = subtract(left, q, weight)", "left = left.clone()"),
    Mutation("rrs", 2, "residual not normalised", laws, "scale(q, present) * mass", "scale(q, present)"),
    Mutation(
        "rrs", 3, "laws of other draws", laws, "first_laws(q, k).unbind(1)", "first_laws(q, k).flip(1).unbind(1)", True
    ),
    Mutation("rrs-wo", 2, "q with earlier draws", rrs, "q = without(q, token)", "q = q.clone()"),
    Mutation("rrs-wo", 3, "q not normalised", laws, *DIVIDED),
    Mutation("kseq", 3, "ρ = 1", kseq, "rho = smallest_rho(p, q, number)", "rho = torch.ones_like(p[:, :1]).double()"),
    Mutation(
        "kseq",
        3,
        "residual less all",
        kseq,
        "subtract(p, both, paid.to(p.dtype))",
        "subtract(p, both, torch.ones_like(beta))",
    ),
    Mutation(
        "spechub",
        2,
        "steps 3 and 4 exchanged",
        spechub,
        "ratio(p_a, left_first), ratio(p_a2, left_second)",
        "ratio(p_a2, left_first), ratio(p_a, left_second)",
    ),
    Mutation("spechub", 2, "Q(a, i) not normalised", spechub, "(q_a * scale(second_top, pair))", "q_a"),
    Mutation("greedy", 2, "last draw against q", greedy, f"without(q, {LAST})", "q"),
    Mutation(
        "greedy",
        3,
        "residual without the tops",
        greedy,
        "single_draft(p, rest",
        f"single_draft(without(p, {LAST}), rest",
    ),
    Mutation("is-lp", 2, "law without the wins", is_lp, "(wins * pairs).sum(-1)", "pairs.triu().sum(-1)"),
    Mutation(
        "is-lp", 2, "ranks ignored", is_lp, "torch.empty_like(self.order).scatter_(1, self.order, ranks)", "ranks"
    ),
    Mutation(
        "is-lp", 3, "law of the first selected", is_lp, "law = law.index_copy(0, rows, new.law)", "law = law.clone()"
    ),
    Mutation("otm-lp", 2, "residual p", otm_lp, "left = np.maximum(target - mass.sum(0), 0)", "left = target"),
    Mutation("topk", 2, "accepted twice", topk, "return p\n", TWICE),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.scheme}, {mutation.what}")
def test_a_broken_rule_has_another_law(mutation: Mutation) -> None:
    name, k, _, part, old, new, each = mutation
    copy, broken = (scheme_in(mutant(module_of(name), (old, line), part=part), name) for line in (old, new))
    assert worst(copy, k, each) < EXACT
    assert worst(broken, k, each) > WRONG


def test_every_lossless_scheme_is_broken_here_or_in_its_own_test() -> None:
    assert {mutation.scheme for mutation in MUTATIONS} == {*LOSSLESS} - {"optimal"}


@pytest.mark.parametrize("name", ["single", "rrs", "rrs-wo", "kseq", "greedy", "spechub"])
def test_masses_that_do_not_sum_to_1_must_be_normalised(name: str) -> None:
    p, q = map(law, CASES["plain"])
    k = min(2, SCHEMES[name].max_draws or 2)
    broken = scheme_in(mutant(module_of(name), DIVIDED, part=laws), name)
    found = outcomes(name, q, k)
    assert deviation(output(SCHEMES[name], p, q / 2, found), p) < EXACT
    assert deviation(output(broken, p, q / 2, found), p) > WRONG


def test_tokens_there_for_sure_must_leave_the_law_of_the_draws() -> None:
    p, q = map(law, CASES["plain"])
    old = "return without(q, tops),"
    broken = scheme_in(mutant(rrs, (old, "return q,")), "rrs-wo")
    rest = [0, *q.tolist()[1:]]  # the likeliest token comes last, for sure
    found = [((*draws, 0), mass) for draws, mass in sequential(rest, 2) if mass > 0]
    sure = torch.tensor([False, False, True])
    assert deviation(output(SCHEMES["rrs-wo"], p, q, found, sure), p) < EXACT
    assert deviation(output(broken, p, q, found, sure), p) > WRONG


@pytest.mark.parametrize("name", ["rrs", "kseq"])
def test_repeats_must_not_be_dropped(name: str) -> None:
    p, q = map(law, CASES["plain"])
    found = outcomes(name, q, 2)
    dropped = [((a, -1 if a == b else b), mass) for (a, b), mass in found]
    assert deviation(output(SCHEMES[name], p, q, found), p) < EXACT
    assert deviation(output(SCHEMES[name], p, q, dropped), p) > WRONG


@pytest.mark.parametrize("name", ["single", "rrs", "rrs-wo", "kseq", "greedy", "is-lp"])
def test_the_law_told_must_be_the_one_after_top_p(name: str) -> None:
    p, q = map(law, CASES["plain"])
    cut = probs(q.log(), SamplingParams(temperature=1, top_p=0.8))
    assert (cut == 0).any()
    found = outcomes(name, cut, min(2, SCHEMES[name].max_draws or 2))
    assert deviation(output(SCHEMES[name], p, cut, found), p) < EXACT
    assert deviation(output(SCHEMES[name], p, q, found), p) > WRONG


def test_a_uniform_of_0_draws_no_token_of_no_mass() -> None:
    """A token is drawn where u < the law cumulated up to it; u <= would draw token 0 at u = 0."""
    q, zero = law([[0, 0, 0.5, 0.5]]), torch.zeros(1, 1, dtype=torch.float64)
    by_blocks = "FEW_CUMULATED = 1 << 16", "FEW_CUMULATED = 0"
    for place, ways in (("uniform * ends[..., -1:]", []), ("share[..., None] * inside[..., -1:]", [by_blocks])):
        assert mutant(sampling, *ways).invert(q, zero).item() == 2
        assert mutant(sampling, *ways, (f"{place}, right=True", f"{place}, right=False")).invert(q, zero).item() == 0


PRUNED = law([0.2, 0.3, 0.5]), law([0.5, 0.3, 0.2])


def test_a_draw_kept_for_its_own_mass_and_verified_as_if_it_were_all_is_biased() -> None:
    """The likelier of two draws without replacement, with the law that this gives by hand."""
    p, q = PRUNED
    likelier = [((min(draws),), mass) for draws, mass in outcomes("rrs-wo", q, 2)]  # q falls
    wrong = law([0.336, 0.161, 0.504])
    torch.testing.assert_close(output(SCHEMES["single"], p, q, likelier), wrong, rtol=0, atol=5e-4)


def test_a_draw_pruned_for_its_own_mass_but_verified_is_harmless() -> None:
    """The same two draws, of which only the likelier has a node: both stand in the verification."""
    p, q = PRUNED
    assert deviation(output(SCHEMES["rrs-wo"], p, q, outcomes("rrs-wo", q, 2)), p) < EXACT
    generator = torch.Generator().manual_seed(2)
    draws = SCHEMES["rrs-wo"].draw(q.expand(1500, -1), 2, generator).tokens
    seen, inner = torch.zeros(3), torch.tensor([0])
    parents, depth, ancestors = torch.tensor([-1, 0]), torch.tensor([0, 1]), torch.ones(2, 2).tril().bool()
    for pair in draws:
        tokens = torch.stack([inner[0], pair.min()])
        tree = TokenTree(tokens, parents, depth, ancestors, Drafts(inner, q[None], Draws(pair[None])))
        seen[Walk(SCHEMES["rrs-wo"])(tree, p.expand(2, -1), generator).tokens[0]] += 1
    assert chisquare(seen, 1500 * p).pvalue > 1e-4
