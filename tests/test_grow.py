"""Growing trees: the most likely part of all drafts, chains that end where the draft is unsure, best draws a node."""

import itertools
import math

import numpy as np
import pytest
import torch
from enumeration import random_law
from equality import seeded
from models import TableConfig, TableModel, draft_tree, follow, random_head
from refusals import complains

from treespec.draft.calibration import DRAWS, TOPS, Calibration, outline
from treespec.draft.pairing import check_fit
from treespec.draft.trained.proposers import EagleProposer
from treespec.draft.tree_drafter import TreeDrafter
from treespec.model.target import Target
from treespec.shaping.sampling import SamplingParams
from treespec.trees.mask import ancestor_mask
from treespec.trees.policy import policy
from treespec.trees.sampled import SampledTree, allot
from treespec.verify.facts import NAMES
from treespec.verify.registry import SCHEMES, verifier_by_name

TEXT, FEATURES = torch.tensor([1, 2, 0, 3, 1]), torch.randn(5, 4, generator=seeded(0))
# At every node .6 by the top, and .4 of what it leaves by the first draw: .2 (.5 without the top); no others.
DRAWN = Calibration((math.log(0.6 / 0.4), 0, -50, 0), (0, 0, 0, 0, -50, 0, 0))
USUAL = Calibration((0, 0.9, -0.3, 0), (0.3, 0.2, -0.1, 0, -0.4, 0, 0))


@pytest.fixture(scope="module")
def table():
    model = Target(TableModel(TableConfig(4, seed=1)))
    return model, random_head(model, seed=2)


def grow(table, tree, verifier="topk", temperature=0.0, calibration=None, seed=0):
    model, head = table
    proposer = EagleProposer(head, model)
    follow(proposer, FEATURES, TEXT)
    drafter = TreeDrafter(proposer, policy(tree), verifier_by_name(verifier).scheme, calibration)
    return draft_tree(drafter, TEXT[-1:], SamplingParams(temperature), seeded(seed))


@torch.no_grad()
def draft_logits(table, path):
    """[V] logits below a path of drafted tokens, by running the head over the whole text with the path."""
    model, head = table
    tokens, known = TEXT, FEATURES
    for token in path:
        hidden = head.step(tokens[None], known[None], torch.arange(len(known)))[0, -1:]
        tokens, known = torch.cat([tokens, torch.tensor([token])]), torch.cat([known, hidden])
    return model.output_logits(head.step(tokens[None], known[None], torch.arange(len(known)))[0, -1])


def test_the_dynamic_tree_is_the_likeliest_part_of_all_drafts(table):
    tree = grow(table, "dynamic:depth=3,topk=16,nodes=12")
    likelihood = {}
    for path in itertools.chain(*(itertools.product(range(4), repeat=d) for d in (1, 2, 3))):
        laws = [draft_logits(table, path[:i]).log_softmax(-1)[path[i]] for i in range(len(path))]
        likelihood[path] = float(sum(laws))
    best = sorted(likelihood, key=likelihood.__getitem__, reverse=True)[:11]
    paths = [tuple(tree.tokens[row][1:].tolist()) for row in tree.ancestors]
    assert set(paths) == {(), *best}
    assert [paths[parent] for parent in tree.parents.tolist()[1:]] == [path[:-1] for path in paths[1:]]
    assert tree.depth.tolist() == [len(path) for path in paths]
    assert torch.equal(tree.ancestors, ancestor_mask(tree.parents))
    assert tree.parents[0] == -1


def test_at_temperature_0_the_children_are_the_likeliest_under_any_verifier(table):
    trees = [grow(table, "3x2", verifier) for verifier in ("topk", "rrs", "greedy")]
    assert all(tree.drafts is None and torch.equal(tree.tokens, trees[0].tokens) for tree in trees)
    assert trees[0].tokens[1:4].tolist() == draft_logits(table, ()).topk(3).indices.tolist()


def test_nothing_is_drafted_before_anything_was_observed(table):
    model, head = table
    fresh = TreeDrafter(EagleProposer(head, model), policy("eagle"), SCHEMES["topk"])
    assert draft_tree(fresh, torch.tensor([3]), SamplingParams(), torch.Generator()).tokens.tolist() == [3]


def test_the_allotted_draws_are_the_best_of_all_pairs():
    generator = seeded(1)
    rates = torch.rand(60, 30, generator=generator, dtype=torch.float64).numpy()
    tops = rates[:, :3] / rates[:, :4].sum(-1, keepdims=True)  # [F, J]
    left = 1 - np.pad(tops.cumsum(-1), ((0, 0), (1, 0)))
    draws = rates[:, 4:24].reshape(60, 4, 5)
    draws = left[..., None] * draws[..., :4] / draws.sum(-1, keepdims=True)  # [F, J + 1, M]
    reach = rates[:, 24]
    for price in (0.02, 0.1, 0.4):
        k, children = allot(reach, tops, draws, price)
        for row in range(60):
            worth = {}
            for j, m in itertools.product(range(4), range(5)):
                accepted = [*draws[row, j, :m].tolist(), *tops[row, :j].tolist()]
                worth[m, j] = reach[row] * sum(accepted) - price * (j + m), accepted
            best = max(worth, key=lambda pair: worth[pair][0])
            wanted = [reach[row] * chance for chance in worth[best][1]]
            assert tuple(k[row].tolist()) == best
            assert children[row].tolist() == pytest.approx(wanted + [0] * (7 - len(wanted)), abs=1e-12)
        same_k, alike = allot(reach, tops, draws, price, even=True)
        assert np.array_equal(same_k, k)
        assert np.allclose(alike.sum(-1), children.sum(-1))
        assert all(len({*alike[row, :m].tolist()}) <= 1 for row, (m, _) in enumerate(k.tolist()))


def test_the_drawn_five_node_tree_is_allotted(table):
    tree = grow(table, "sampled:price=.15", "rrs-wo", 1.0, DRAWN)
    assert tree.parents.tolist() == [-1, 0, 0, 2, 3]
    assert tree.drafts.nodes.tolist() == [0, 2, 3]
    assert (tree.drafts.draws.tokens >= 0).sum(-1).tolist() == [2, 1, 1]
    assert tree.tokens[2:].tolist() == tree.drafts.q.argmax(-1).tolist()


@pytest.mark.parametrize("price", [0.001, 0.03, 0.2])
def test_children_are_reached_no_more_often_than_their_parent(price):
    """By any calibration."""
    generator = seeded(2)
    q = torch.stack([random_law(20, generator) for _ in range(200)])
    for _ in range(5):
        weights = torch.randn(11, generator=generator).tolist()
        tops, draws = Calibration(tuple(weights[:4]), tuple(weights[4:])).chances(outline(q).numpy(), depth=2)
        assert (tops.shape, draws.shape) == ((200, TOPS), (200, TOPS + 1, DRAWS))
        reach = torch.rand(200, generator=generator, dtype=q.dtype).numpy()
        _, children = allot(reach, tops, draws, price)
        assert (children >= 0).all()
        assert (children.sum(-1) <= reach + 1e-12).all()


def test_without_a_calibration_it_is_refused_with_a_remedy(table):
    with complains("treespec calibrate"):
        grow(table, "sampled", "rrs-wo", 1.0)


def test_the_price_follows_the_sizes_of_a_sequences_trees_to_the_wanted_mean():
    """Trees have 3 / price nodes here; a given price stays."""
    tree = SampledTree(nodes=30)
    price = tree.first
    for _ in range(60):
        price = tree.update(price, round(3 / price) - 1)
    assert 3 / price == pytest.approx(30, rel=0.05)
    assert SampledTree(price=0.05).update(0.05, 99) == SampledTree(price=0.05).first == 0.05


@pytest.mark.parametrize("name", NAMES)
def test_sampled_trees_go_with_verifiers_that_take_tokens_for_sure(name):
    scheme = verifier_by_name(name, allow_lossy=True).scheme
    if name in ("rrs-wo", "optimal", "traversal"):
        check_fit(SampledTree(), scheme)
    else:
        with complains(f"the sampled tree cannot go with verifier {scheme.name}"):
            check_fit(SampledTree(), scheme)
