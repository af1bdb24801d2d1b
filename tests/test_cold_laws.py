"""At low temperature what is left of q may be tiny: every scheme gives p all the same, in float32 and in float64.

Laws come from logits by `probs`, as in use. The output's law is exact over all draws, of which one on what is left of
q is as likely as any other, however little that is.
"""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from enumeration import ENUMERABLE, SCHEMES, law, outcomes, scheme_by_name
from models import TableConfig, TableModel
from scipy.stats import chisquare, norm
from test_sampled import with_tops
from test_tree_verifiers import deviation, production, text_law
from torch import Tensor
from verdicts import Shape, Tables

from treespec.api.spec import Spec
from treespec.draft.grow.fixed import draft_laws, stack
from treespec.draft.models.model import ModelProposer
from treespec.model.target import Target
from treespec.shaping.sampling import SamplingParams, probs
from treespec.trees.static import StaticTree, chain
from treespec.trees.tree import Drafts, Draws, TokenTree
from treespec.verify.laws import distinct
from treespec.verify.optimal import Optimal
from treespec.verify.registry import verifier_by_name
from treespec.verify.scheme import Scheme
from treespec.verify.traversal import Traversal

ERROR = 1e-4  # probability that a χ² fails by chance
TOKENS = 100

# The draft's second token is as unlikely as float32 can say: 4.75 / .05 = 95, exp(-95) = 5e-42.
EXAMPLE = [0.0, 10.0, 10.05, 10.05], [10.0, 5.25, 5.2, 5.15]
TEMPERATURES = (0.01, 0.02, 0.05, 0.1, 0.3, 0.7, 1.0, 2.0)
SPREADS = (5.0, 10.0, 20.0)
# A plan's few sums and products of numbers up to 1 round by some 2^-24 each, 6e-8; in float64 by 2^-53.
EXACT = {torch.float32: 2e-6, torch.float64: 1e-13}
# Of logits over T, between the draft's largest and the others: normal, subnormal, and 0 probabilities.
GAPS = {torch.float32: (80, 87, 88, 92, 97, 103, 106), torch.float64: (700, 708, 712, 725, 740, 744, 750)}
SLOW = ("otm-lp",)
NAMES = [*ENUMERABLE, "is-lp:s=2", "is-lp:alphabet=2"]


@cache
def logits(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[B, V] of target and draft: the example, random ones of each spread, and drafts with each gap."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.tensor(EXAMPLE)]
    for spread in SPREADS:
        rows += [spread * torch.rand(2, 4, generator=generator) for _ in range(4)]
    for temperature in (0.02, 0.05):
        for gap in GAPS[dtype]:
            target, draft = 5 * temperature * torch.rand(2, 4, generator=generator)
            draft[gap % 4] += gap * temperature
            rows.append(torch.stack([target, draft]))
    p, q = torch.stack(rows, 1).to(dtype)
    return p, q


def mean_plans(scheme: Scheme, p: Tensor, q: Tensor, draws: list[tuple[Draws, Tensor]]) -> Tensor:
    """[B, V] over all the draws of each row and their chances; checks that every plan is a law."""
    rows = torch.arange(len(p)).repeat_interleave(torch.tensor([len(chances) for _, chances in draws]))
    plan = scheme.plan(p[rows], q[rows], stack([one for one, _ in draws]))
    assert plan.dtype == p.dtype
    assert (plan >= 0).all()
    assert (plan.sum(-1) - 1).abs().max() < 10 * EXACT[p.dtype]
    chances = torch.cat([chances for _, chances in draws])
    return torch.zeros(p.shape, dtype=torch.float64).index_add_(0, rows, chances[:, None] * plan.double())


def all_draws(name: str, q: Tensor, k: int) -> tuple[Draws, Tensor]:
    """Of one node, and their chances by q [V] or [K, V] to the last digit."""
    found = outcomes(name, unit(q), k)
    return Draws(torch.tensor([tokens for tokens, _ in found])), law([chance for _, chance in found])


def unit(rows: Tensor) -> Tensor:
    return rows.double() / rows.double().sum(-1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_every_scheme_gives_the_targets_law_at_every_temperature(name: str, dtype: torch.dtype) -> None:
    scheme = scheme_by_name(name)
    for temperature in TEMPERATURES[2:6:3] if name in SLOW else TEMPERATURES:
        p, q = (probs(rows, SamplingParams(temperature)) for rows in logits(dtype))
        for k in range(1, (scheme.max_draws or 3) + 1):
            output = mean_plans(scheme, p, q, [all_draws(scheme.name, row, k) for row in q])
            torch.testing.assert_close(output, unit(p), rtol=0, atol=EXACT[dtype])


@pytest.mark.parametrize("name", ["rrs", "is-lp"])
def test_draws_of_several_temperatures_give_it_too(name: str) -> None:
    scheme = scheme_by_name(f"{name}:draft-temperatures=0.4/1/1.7")
    for temperature in TEMPERATURES:
        p, q = logits(torch.float32)
        laws = draft_laws(q, scheme, SamplingParams(temperature), 3)
        p = probs(p, SamplingParams(temperature))
        output = mean_plans(scheme, p, laws, [all_draws(name, rows, 3) for rows in laws])
        torch.testing.assert_close(output, unit(p), rtol=0, atol=EXACT[torch.float32])


@pytest.mark.parametrize(("number", "sure"), [(1, 1), (2, 1), (1, 2)])
def test_draws_beside_tokens_for_sure_give_it_too(number: int, sure: int) -> None:
    for temperature in TEMPERATURES:
        p, q = (probs(rows, SamplingParams(temperature)) for rows in logits(torch.float32))
        output = mean_plans(SCHEMES["rrs-wo"], p, q, [with_tops(unit(row), number, sure) for row in q])
        torch.testing.assert_close(output, unit(p), rtol=0, atol=EXACT[torch.float32])


@pytest.mark.parametrize("asked", [3, [2, 1]], ids=["draws", "draws and tops"])
@pytest.mark.parametrize("scheme", [Optimal(), Optimal(exact=1, first=1)])
def test_the_mean_plan_of_optimal_is_the_targets_law(scheme: Optimal, asked: int | list[int]) -> None:
    """Its draws carry uniforms, so they are sampled: no error of the mean is beyond chance."""
    runs = 60
    for temperature in (0.02, 0.05):
        p, q = (probs(rows, SamplingParams(temperature)) for rows in logits(torch.float32))
        rows = q.repeat_interleave(runs, 0)
        generator = torch.Generator().manual_seed(1)
        if isinstance(asked, int):
            draws = scheme.draw(rows, asked, generator)
        else:
            drawn, sure = (torch.full((len(rows),), count) for count in asked)
            draws = scheme.draw_with_sure(rows, drawn, sure, generator)
        plan = scheme.plan(p.repeat_interleave(runs, 0), rows, draws).double().view(*p.shape[:1], runs, -1)
        errors = (plan.mean(1) - unit(p)) / (plan.std(1) / runs**0.5 + EXACT[torch.float32])
        assert errors.abs().max() < norm.isf(ERROR / errors.numel() / 2)


def test_float32_laws_are_those_of_float64_but_for_the_rounding_of_the_logits() -> None:
    """A logit of z / T is off by half a bit of it, and so is the log of a probability, twice."""
    for temperature in TEMPERATURES:
        single, double = (probs(logits(dtype)[0], SamplingParams(temperature)) for dtype in EXACT)
        off = 2.0**-23 * (max(SPREADS) / temperature + 10)
        torch.testing.assert_close(single.double(), double, rtol=off, atol=1e-37)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SLOW])
def test_subnormal_masses_never_give_a_plan_that_is_no_law(name: str) -> None:
    """As they come where `probs` is not asked; nor do draws that only rounding makes possible."""
    generator = torch.Generator().manual_seed(0)
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
        torch.testing.assert_close(plan.sum(-1), torch.ones(len(p)), rtol=0, atol=1e-5)


def test_traversal_goes_on_where_rounding_leaves_no_residual() -> None:
    """The first draw is refused, though p - q is 0 everywhere."""
    tree = TokenTree(
        torch.tensor([0, 0, 1]), torch.tensor([-1, 0, 0]), torch.tensor([0, 1, 1]), torch.eye(3, dtype=torch.bool)
    )
    q = torch.tensor([[1e-8, 0.5, 0.5]])
    tree = replace(tree, drafts=Drafts(torch.tensor([0]), q, Draws(torch.tensor([[0, 1]]))))
    p = torch.tensor([[0, 0.5, 0.5]]).expand(3, -1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        assert all(token in (1, 2) for token in Traversal()(tree, p, generator).tokens)


COLD = (0.01, 0.05, 1.0)
CHAIN, TREE = Shape(chain(2)), Shape(StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))))


def cold_tables(temperature: float) -> Tables:
    """Three tokens: after every text the draft has one far above the others, or none, and the target likes all."""
    generator = torch.Generator().manual_seed(2)
    p, q = {}, {}
    for text in [text for length in range(3) for text in product(range(3), repeat=length)]:
        target, draft = 2 * temperature * torch.rand(2, 3, generator=generator)
        draft[int(torch.randint(4, (1,), generator=generator)) :][:1] += 95 * temperature
        laws = probs(torch.stack([target, draft]), SamplingParams(temperature))
        p[text], q[text] = laws.double().div(laws.double().sum(-1, keepdim=True)).tolist()
    return Tables(p, q)


@pytest.mark.parametrize(
    ("verifier", "shape"),
    [("block", CHAIN), ("traversal", TREE), ("layer:greedy", TREE), ("rrs-wo", TREE)],
)
def test_verifiers_of_whole_trees_give_the_targets_law_too(verifier: str, shape: Shape) -> None:
    """In float32, over all trees, which the target continues to three tokens."""
    verify = verifier_by_name(verifier)
    for temperature in COLD:
        tables = cold_tables(temperature)
        found = text_law(verify.scheme.name, production(verify, torch.float32), shape, tables)
        assert deviation(tables.completed(found, 3), tables.of_sequences(3)) < 2e-6


@pytest.mark.parametrize(
    ("verifier", "tree"),
    [
        ("rrs-wo", "3x2"),
        ("traversal", "3x2"),
        ("greedy", "2x2"),
        ("layer:greedy", "2x2"),
        ("spechub", "2x1"),
        ("optimal", "3x2"),
    ],
)
def test_the_loop_gives_the_law_of_the_example(verifier: str, tree: str) -> None:
    """0, .155, .422 and .422 at each position, whatever was before."""
    target, draft = (Target(TableModel(TableConfig(4))) for _ in EXAMPLE)
    for model, row in zip((target, draft), EXAMPLE, strict=True):
        model.model.model.table.data[:] = torch.tensor(row)
    spec = Spec(target, ModelProposer(draft, target), tree, verifier)
    text = spec.generate([1, 2], temperature=0.05, max_new_tokens=TOKENS, seed=5).token_ids
    seen = [text.count(token) for token in range(4)]
    assert seen[0] == 0
    assert chisquare(seen[1:], [TOKENS * mass for mass in (0.15536, 0.42232, 0.42232)]).pvalue > ERROR
