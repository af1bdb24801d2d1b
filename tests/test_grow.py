"""Growing trees: EAGLE-2's tree is the likeliest part of all drafts, sampled trees carry the laws they came from."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from enumeration import STOCHASTIC
from models import TableConfig, TableModel, draft_tree, follow, random_head
from scipy.stats import chi2_contingency

from treespec.draft.trained.proposers import EagleProposer
from treespec.draft.tree_drafter import TreeDrafter
from treespec.model.target import Target
from treespec.shaping.sampling import SamplingParams, TargetDistributions, probs
from treespec.trees.policy import policy
from treespec.trees.static import StaticTree
from treespec.verify.registry import scheme_by_name
from treespec.verify.walk import Walk

TEXT, FEATURES = torch.tensor([1, 2, 0, 3, 1]), torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def table():
    model = Target(TableModel(TableConfig(4, seed=1)))
    return model, random_head(model, seed=2)


LEVELS = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


def drafter(table, tree, verifier):
    model, head = table
    proposer = EagleProposer(head, model)
    follow(proposer, FEATURES, TEXT)
    return TreeDrafter(proposer, policy(tree) if isinstance(tree, str) else tree, scheme_by_name(verifier))


@torch.no_grad()
def draft_logits(table, path):
    """[V] logits below a path of drafted tokens, by running the head over the whole text with the path."""
    model, head = table
    tokens, known = TEXT, FEATURES
    for token in path:
        hidden = head.step(tokens[None], known[None], torch.arange(len(known)))[0, -1:]
        tokens, known = torch.cat([tokens, torch.tensor([token])]), torch.cat([known, hidden])
    return model.output_logits(head.step(tokens[None], known[None], torch.arange(len(known)))[0, -1])


def paths(tree):
    """The tokens from the root down to each node."""
    return [tuple(tree.tokens[row][1:].tolist()) for row in tree.ancestors]


def test_the_dynamic_tree_is_the_likeliest_part_of_all_drafts(table):
    tree = draft_tree(
        drafter(table, "dynamic:depth=3,topk=16,nodes=12", "topk"), TEXT[-1:], SamplingParams(), torch.Generator()
    )
    likelihood = {}
    for path in itertools.chain(*(itertools.product(range(4), repeat=d) for d in (1, 2, 3))):
        laws = [draft_logits(table, path[:i]).log_softmax(-1)[path[i]] for i in range(len(path))]
        likelihood[path] = float(sum(laws))
    best = sorted(likelihood, key=likelihood.__getitem__, reverse=True)[:11]
    assert set(paths(tree)) == {(), *best}
    assert tree.depth.tolist() == [len(path) for path in paths(tree)]
    for node, parent in enumerate(tree.parents.tolist()):
        assert paths(tree)[node][:-1] == paths(tree)[parent] if parent >= 0 else node == 0


def test_a_sampled_tree_stores_the_laws_that_its_draws_came_from(table):
    params = SamplingParams(temperature=0.7, top_k=3)
    generator = torch.Generator().manual_seed(4)
    tree = draft_tree(drafter(table, "3x2", "rrs"), TEXT[-1:], params, generator)
    for row, node in enumerate(tree.drafts.nodes.tolist()):
        law = probs(draft_logits(table, paths(tree)[node]), params)
        assert torch.allclose(tree.drafts.q[row], law, atol=1e-5)
        children = tree.tokens[tree.parents == node]
        assert torch.equal(children, tree.drafts.draws.tokens[row])
        assert (law[children] > 0).all()


def test_draws_at_temperatures_of_their_own_store_a_law_each(table):
    """The first draw at 0.7, the others at 1.4 times the sampling temperature; levels of 3, 2 and 1 draws."""
    params = SamplingParams(temperature=0.8, top_p=0.9)
    tree = draft_tree(
        drafter(table, LEVELS, "rrs:draft-temperatures=0.7/1.4"), TEXT[-1:], params, torch.Generator().manual_seed(5)
    )
    q, tokens = tree.drafts.q, tree.drafts.draws.tokens
    assert q.shape == (4, 3, 4)
    assert (tokens >= 0).sum(1).tolist() == [3, 2, 1, 1]
    for row, draw in (tokens >= 0).nonzero().tolist():
        own = replace(params, temperature=0.8 * (1.4 if draw else 0.7))
        law = probs(draft_logits(table, paths(tree)[tree.drafts.nodes[row]]), own)
        assert torch.allclose(q[row, draw], law, atol=1e-5)
        assert law[tokens[row, draw]] > 0


@pytest.mark.parametrize(
    ("verifier", "draws"), [("rrs:draft-temperatures=0.5/1/2", 3), ("is-lp:draft-temperatures=0.5/2", 2)]
)
def test_draws_at_temperatures_of_their_own_are_accepted_at_the_stated_rate(table, verifier, draws):
    """z below 4: by chance in 6e-5 of all seeds."""
    params, runs = SamplingParams(temperature=0.8), 800
    generator = torch.Generator().manual_seed(6)
    p = probs(torch.randn(1 + draws, 4, generator=generator), params)
    trees = [draft_tree(drafter(table, f"{draws}x1", verifier), TEXT[-1:], params, generator) for _ in range(runs)]
    scheme = scheme_by_name(verifier)
    accepted = sum(len(Walk(scheme)(tree, p, generator).path) for tree in trees)
    rate = float(scheme.acceptance_rate(p[:1], trees[0].drafts.q, draws))
    assert 0.1 < rate < 0.95
    assert abs(accepted / runs - rate) < 4 * math.sqrt(rate * (1 - rate) / runs)


@pytest.mark.parametrize("verifier", [*STOCHASTIC, "rrs:draft-temperatures=0.5/1/2"])
def test_a_node_has_the_same_plan_by_itself_as_among_all(table, verifier):
    scheme = scheme_by_name(verifier)
    shape = LEVELS.narrowed(scheme.max_draws) if scheme.max_draws else LEVELS
    generator = torch.Generator().manual_seed(7)
    for _ in range(5):
        tree = draft_tree(drafter(table, shape, verifier), TEXT[-1:], SamplingParams(temperature=0.8), generator)
        logits = torch.randn(len(tree.tokens), 4, generator=generator, dtype=torch.float64)
        laws, walk = TargetDistributions(logits, SamplingParams(temperature=0.8)), Walk(scheme)
        row_of = {node: row for row, node in enumerate(tree.drafts.nodes.tolist())}
        alone = [walk.plan_at(tree, laws, node, row_of.get(node)) for node in range(len(logits))]
        assert torch.allclose(torch.cat(alone), walk.plans(tree, laws), rtol=0, atol=1e-6)


def test_all_nodes_at_once_and_one_after_another_output_the_same_law(table):
    """Frequencies of 3000 verdicts each way on one tree, by χ² of the two samples, with an error of 1e-4."""
    generator, params = torch.Generator().manual_seed(8), SamplingParams(temperature=0.8)
    tree = draft_tree(drafter(table, LEVELS, "rrs-wo"), TEXT[-1:], params, generator)
    p, walk = probs(torch.randn(len(tree.tokens), 4, generator=generator), params), Walk(scheme_by_name("rrs-wo"))
    seen = [
        Counter(tuple(way(tree, p, generator).tokens) for _ in range(3000)) for way in (walk.at_once, walk.step_by_step)
    ]
    table_of = [[counts[text] for text in seen[0] | seen[1]] for counts in seen]
    assert len(table_of[0]) > 8
    assert chi2_contingency(table_of).pvalue > 1e-4


def test_at_temperature_0_the_children_are_the_likeliest_under_any_verifier(table):
    trees = [
        draft_tree(drafter(table, "3x2", verifier), TEXT[-1:], SamplingParams(), torch.Generator())
        for verifier in ("topk", "rrs", "rrs:draft-temperatures=0.5/2", "greedy")
    ]
    for tree in trees:
        assert tree.drafts is None
        assert torch.equal(tree.tokens, trees[0].tokens)
    assert trees[0].tokens[1:4].tolist() == draft_logits(table, ()).topk(3).indices.tolist()


def test_nothing_is_drafted_before_anything_was_observed(table):
    model, head = table
    fresh = TreeDrafter(EagleProposer(head, model), policy("eagle"), scheme_by_name("topk"))
    assert draft_tree(fresh, torch.tensor([3]), SamplingParams(), torch.Generator()).tokens.tolist() == [3]
