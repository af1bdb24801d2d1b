"""Sampled trees: how many draws a node gets is the best for its price and settled before any is made."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from enumeration import CASES, law, random_law, sequential
from models import TableConfig, TableModel, draft_tree, follow, random_head
from scipy.stats import chisquare
from torch import Tensor

from treespec.draft.calibration import DRAWS, TOPS, Calibration
from treespec.draft.outlines import outline
from treespec.draft.pairing import check_pair
from treespec.draft.trained.proposers import EagleProposer
from treespec.draft.tree_drafter import TreeDrafter
from treespec.errors import InputError
from treespec.heads.eagle import EagleHead
from treespec.model.target import Target
from treespec.shaping.sampling import SamplingParams
from treespec.trees.policy import policy
from treespec.trees.sampled import SampledTree, allot
from treespec.trees.tree import Draws, TokenTree
from treespec.verify.facts import NAMES
from treespec.verify.registry import verifier_by_name
from treespec.verify.rrs import RRSWithoutReplacement

ERROR = 1e-4  # probability that a χ² fails by chance
COUNTS = [(draws, tops) for draws in range(3) for tops in range(3)]

# At every node .6 by the top, and .4 of what it leaves by the first draw: .2 (.5 without the top); no others.
DRAWN = Calibration((math.log(0.6 / 0.4), 0, -50, 0), (0, 0, 0, 0, -50, 0, 0))
USUAL = Calibration((0, 0.9, -0.3, 0), (0.3, 0.2, -0.1, 0, -0.4, 0, 0))
MIXED = Calibration((0.2, 0.1, -4, 0), (-0.3, 0.2, -0.1, 0, -0.4, 0, 0))  # tops and draws at a node


def table_of(vocabulary: int) -> tuple[Target, EagleHead]:
    model = Target(TableModel(TableConfig(vocabulary, seed=1)))
    return model, random_head(model, seed=2)


@pytest.fixture(scope="module")
def table() -> tuple[Target, EagleHead]:
    return table_of(4)


def grow(
    table: tuple[Target, EagleHead],
    tree: str,
    calibration: Calibration | None,
    seed: int = 0,
    temperature: float = 1.0,
    verifier: str = "rrs-wo",
) -> TokenTree:
    model, head = table
    proposer = EagleProposer(head, model)
    text = torch.tensor([1, 2, 0, 3, 1])
    follow(proposer, model.features(text[None])[0], text)
    drafter = TreeDrafter(proposer, policy(tree), verifier_by_name(verifier).scheme, calibration)
    return draft_tree(drafter, text[-1:], SamplingParams(temperature), torch.Generator().manual_seed(seed))


def random_chances(rows: int, generator: torch.Generator) -> tuple[np.ndarray, np.ndarray]:
    """tops [F, J] and draws [F, J + 1, M] of no more than 1 in all, J = 3, M = 4."""
    tops = torch.rand(rows, 4, generator=generator, dtype=torch.float64)
    tops = tops[:, :3] / tops.sum(-1, keepdim=True)
    draws = torch.rand(rows, 4, 5, generator=generator, dtype=torch.float64)
    left = 1 - torch.nn.functional.pad(tops.cumsum(-1), (1, 0))
    return tops.numpy(), (left[..., None] * draws[..., :4] / draws.sum(-1, keepdim=True)).numpy()


def test_the_allotted_draws_are_the_best_of_all_pairs() -> None:
    generator = torch.Generator().manual_seed(1)
    tops, draws = random_chances(60, generator)
    reach = torch.rand(60, generator=generator, dtype=torch.float64).numpy()
    for price in (0.02, 0.1, 0.4):
        k, children = allot(reach, tops, draws, price)
        for row in range(60):
            worth = {}
            for j in range(4):
                for m in range(5):
                    accepted = [*draws[row, j, :m].tolist(), *tops[row, :j].tolist()]
                    worth[m, j] = float(reach[row]) * sum(accepted) - price * (j + m), accepted
            best = max(worth, key=lambda pair: worth[pair][0])
            wanted = [float(reach[row]) * chance for chance in worth[best][1]]
            assert tuple(k[row].tolist()) == best
            assert children[row].tolist() == pytest.approx(wanted + [0] * (7 - len(wanted)), abs=1e-12)
        same_k, alike = allot(reach, tops, draws, price, even=True)
        assert np.array_equal(same_k, k)
        assert np.allclose(alike.sum(-1), children.sum(-1))
        for row, (m, _) in enumerate(k.tolist()):
            assert len(set(alike[row, :m].tolist())) <= 1
            assert np.array_equal(alike[row, m:], children[row, m:])


def test_children_stand_in_the_drawn_places() -> None:
    tops = np.array([[0.3, 0.2, 0.0, 0.0]])
    draws = np.zeros((1, 5, 4))
    draws[0, 2, :3] = 0.2, 0.1, 0.05
    counts, children = allot(np.array([0.5]), tops, draws, price=0.01)
    assert counts.tolist() == [[3, 2]]
    assert children[0].tolist() == pytest.approx([0.1, 0.05, 0.025, 0.15, 0.1, 0, 0, 0])


def test_the_drawn_five_node_tree_is_allotted(table: tuple[Target, EagleHead]) -> None:
    tops = np.array([[0.6]])
    draws = np.array([[[0.5, 0.0], [0.2, 0.0]]])  # without the top, with it
    reached = []
    for reach in (1.0, 0.2, 0.6, 0.36, 0.216):  # root, a, b, c, d
        k, children = allot(np.array([reach]), tops, draws, price=0.15)
        reached.append((k.tolist()[0], children[children > 0].tolist()))
    ks = [[1, 1], [0, 0], [0, 1], [0, 1], [0, 0]]
    below = [[0.2, 0.6], [], [0.36], [0.216], []]
    for (k, children), wanted_k, wanted in zip(reached, ks, below, strict=True):
        assert k == wanted_k
        assert children == pytest.approx(wanted)

    tree = grow(table, "sampled:price=.15", DRAWN)
    assert tree.parents.tolist() == [-1, 0, 0, 2, 3]
    assert tree.depth.tolist() == [0, 1, 1, 2, 3]
    assert tree.drafts
    assert tree.drafts.nodes.tolist() == [0, 2, 3]
    assert (tree.drafts.draws.tokens >= 0).sum(-1).tolist() == [2, 1, 1]
    assert tree.tokens[2:].tolist() == tree.drafts.q.argmax(-1).tolist()


def test_the_number_of_draws_does_not_depend_on_what_is_drawn() -> None:
    """At the root by nothing; below it by the child's own token and place, not by its siblings."""
    table = table_of(6)
    at_root, drawn = set(), set()
    below: dict[tuple[int, int], set[int]] = defaultdict(set)
    for seed in range(60):
        tree = grow(table, "sampled:price=.05,depth=2", MIXED, seed)
        children = (tree.parents == 0).nonzero().flatten().tolist()
        assert tree.drafts
        assert tree.drafts.draws.sure is not None
        tokens, sure = tree.drafts.draws.tokens[0], tree.drafts.draws.sure[0]
        at_root.add((int(((tokens >= 0) & ~sure).sum()), int(((tokens >= 0) & sure).sum())))
        assert len(children) == (tokens >= 0).sum()
        drawn.add(tuple(tree.tokens[children].tolist()))
        for place, child in enumerate(children):
            below[place, int(tree.tokens[child])].add(int((tree.parents == child).sum()))
    assert at_root == {(3, 1)}
    assert len(drawn) > 10
    assert all(len(numbers) == 1 for numbers in below.values())
    assert len({*map(tuple, below.values())}) > 1


@pytest.mark.parametrize("price", [0.001, 0.03, 0.2])
def test_children_are_reached_no_more_often_than_their_parent(price: float) -> None:
    generator = torch.Generator().manual_seed(2)
    q = torch.stack([random_law(20, generator) for _ in range(200)])
    for _ in range(5):
        weights = torch.randn(11, generator=generator).tolist()
        calibration = Calibration(tuple(weights[:4]), tuple(weights[4:]))
        tops, draws = calibration.chances(outline(q), depth=2)
        assert tops.shape == (200, TOPS)
        assert draws.shape == (200, TOPS + 1, DRAWS)
        reach = torch.rand(200, generator=generator, dtype=q.dtype).numpy()
        k, children = allot(reach, tops, draws, price)
        assert (children >= 0).all()
        assert (children.sum(-1) <= reach + 1e-12).all()
        assert ((children > 0).sum(-1) <= k.sum(-1)).all()


def with_tops(q: Tensor, draws: int, tops: int) -> tuple[Draws, Tensor]:
    """All draws of positive probability, the tops after them, and their probabilities. q: [V]."""
    masses = q.tolist()
    sure = [x for x in sorted(range(len(masses)), key=lambda x: -masses[x])[:tops] if masses[x] > 0]
    rest = [0.0 if x in sure else mass for x, mass in enumerate(masses)]
    tokens, is_sure, chances = [], [], []
    for sampled, chance in sequential(rest, draws):
        if chance > 0:
            there = [x for x in sampled if x >= 0]
            absent = draws + tops - len(there) - len(sure)
            tokens.append([*there, *sure, *[-1] * absent])
            is_sure.append([False] * len(there) + [True] * (len(sure) + absent))
            chances.append(chance)
    return Draws(torch.tensor(tokens, dtype=torch.int64), torch.tensor(is_sure)), law(chances)


def pairs() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    random = [(random_law(5, generator), random_law(5, generator)) for _ in range(25)]
    return [(law(p), law(q)) for p, q in CASES.values()] + random


@pytest.mark.parametrize(("draws", "tops"), [count for count in COUNTS if any(count)])
def test_draws_and_tokens_for_sure_give_p_by_enumeration(draws: int, tops: int) -> None:
    for p, q in pairs():
        drawn, chances = with_tops(q, draws, tops)
        rows = len(chances)
        plan = RRSWithoutReplacement().plan(p.expand(rows, -1), q.expand(rows, -1), drawn)
        assert (plan >= 0).all()
        torch.testing.assert_close(plan.sum(-1), torch.ones_like(chances), rtol=0, atol=1e-12)
        torch.testing.assert_close(chances @ plan, p, rtol=0, atol=1e-12)


def test_tokens_for_sure_that_are_taken_for_draws_bias_the_law() -> None:
    p, q = law([0.1, 0.2, 0.3, 0.4]), law([0.35, 0.3, 0.25, 0.1])
    drawn, chances = with_tops(q, 1, 1)
    plan = RRSWithoutReplacement().plan(p.expand(3, -1), q.expand(3, -1), Draws(drawn.tokens))
    assert (chances @ plan - p).abs().max() > 0.01


def test_tokens_for_sure_are_the_likeliest_and_come_after_the_draws() -> None:
    generator = torch.Generator().manual_seed(4)
    k = torch.tensor(COUNTS)
    for _, q in pairs():
        drawn = RRSWithoutReplacement().draw_with_sure(q.expand(len(k), -1), *k.unbind(-1), generator)
        for (number, tops), tokens, is_sure in zip(COUNTS, drawn.tokens, drawn.sure, strict=True):
            support = int((q > 0).sum())
            sure = min(tops, support)
            sampled = min(number, support - sure)
            assert (tokens >= 0).tolist() == [True] * (sampled + sure) + [False] * (len(tokens) - sampled - sure)
            assert is_sure[: sampled + sure].tolist() == [False] * sampled + [True] * sure
            there = tokens[: sampled + sure].tolist()
            assert len({*there}) == len(there)
            assert q[there[sampled:]].tolist() == q.topk(sure).values.tolist()


def test_draws_beside_tokens_for_sure_follow_the_rest_of_q() -> None:
    q, runs = law([0.35, 0.3, 0.2, 0.1, 0.05]), 20_000
    generator = torch.Generator().manual_seed(5)
    number, sure = torch.full((runs,), 2), torch.ones(runs, dtype=torch.int64)
    tokens = RRSWithoutReplacement().draw_with_sure(q.expand(runs, -1), number, sure, generator).tokens
    drawn, chances = with_tops(q, 2, 1)
    seen = Counter(map(tuple, tokens.tolist()))
    counts = [seen[tuple(row)] for row in drawn.tokens.tolist()]
    assert chisquare(counts, (chances * runs).numpy()).pvalue > ERROR


def test_at_temperature_0_the_sampled_tree_is_the_dynamic_tree(table: tuple[Target, EagleHead]) -> None:
    sampled = grow(table, "sampled:nodes=12,depth=3", USUAL, temperature=0)
    dynamic = grow(table, "dynamic:nodes=12,depth=3", None, temperature=0, verifier="topk")
    assert sampled.drafts is None
    for name in ("tokens", "parents", "depth", "ancestors"):
        assert torch.equal(getattr(sampled, name), getattr(dynamic, name))


def test_a_sampled_tree_without_a_calibration_is_refused_with_a_remedy(table: tuple[Target, EagleHead]) -> None:
    with pytest.raises(InputError, match="treespec calibrate"):
        grow(table, "sampled", None)


TAKES_SURE_TOKENS = ("rrs-wo", "optimal", "traversal", "auto", "layer:optimal")


@pytest.mark.parametrize("name", NAMES)
def test_the_sampled_tree_goes_with_verifiers_that_take_tokens_for_sure(name: str) -> None:
    scheme = verifier_by_name(name, allow_lossy=True).scheme
    if name in TAKES_SURE_TOKENS:
        check_pair(SampledTree(), scheme)
    else:
        with pytest.raises(InputError, match=f"the sampled tree cannot go with verifier {scheme.name}"):
            check_pair(SampledTree(), scheme)
