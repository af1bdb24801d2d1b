"""Growing trees: the most likely part of all drafts, whatever verifies."""

import itertools

import pytest
import torch
from models import TableConfig, TableModel, draft_tree, follow, random_head, seeded

from treespec.draft.heads.proposers import EagleProposer
from treespec.draft.tree_drafter import TreeDrafter
from treespec.model.target import Target
from treespec.sampling.probs import SamplingParams
from treespec.trees.mask import build_ancestor_mask
from treespec.trees.policy import parse_policy
from treespec.verify.registry import SCHEMES, load_verifier

TEXT = torch.tensor([1, 2, 0, 3, 1])
FEATURES = torch.randn(5, 4, generator=seeded(0))


@pytest.fixture(scope="module")
def table():
    model = Target(TableModel(TableConfig(4, seed=1)))
    return model, random_head(model, seed=2)


def grow(table, tree, verifier="topk", temperature=0.0, seed=0):
    model, head = table
    proposer = EagleProposer(head, model)
    follow(proposer, FEATURES, TEXT)
    drafter = TreeDrafter(proposer, parse_policy(tree), load_verifier(verifier).scheme)
    return draft_tree(drafter, TEXT[-1:], SamplingParams(temperature), seeded(seed))


@torch.no_grad()
def draft_logits(table, path):
    """[V] logits below a path of drafted tokens, by running the head over the whole text with the path."""
    model, head = table
    tokens = TEXT
    known = FEATURES
    for token in path:
        hidden = head.forward_step(tokens[None], known[None], torch.arange(len(known)))[0, -1:]
        tokens = torch.cat([tokens, torch.tensor([token])])
        known = torch.cat([known, hidden])
    return model.compute_output_logits(head.forward_step(tokens[None], known[None], torch.arange(len(known)))[0, -1])


def test_the_dynamic_tree_is_the_most_likely_part_of_all_drafts(table):
    tree = grow(table, "dynamic:depth=3,topk=16,nodes=12")
    likelihood = {}
    for path in itertools.chain(*(itertools.product(range(4), repeat=d) for d in (1, 2, 3))):
        distributions = [draft_logits(table, path[:i]).log_softmax(-1)[path[i]] for i in range(len(path))]
        likelihood[path] = float(sum(distributions))
    best = sorted(likelihood, key=likelihood.__getitem__, reverse=True)[:11]
    paths = [tuple(tree.tokens[row][1:].tolist()) for row in tree.ancestors]
    assert set(paths) == {(), *best}
    assert [paths[parent] for parent in tree.parents.tolist()[1:]] == [path[:-1] for path in paths[1:]]
    assert tree.depth.tolist() == [len(path) for path in paths]
    assert torch.equal(tree.ancestors, build_ancestor_mask(tree.parents))
    assert tree.parents[0] == -1


def test_at_temperature_0_children_are_the_most_likely_under_any_verifier(table):
    trees = [grow(table, "3x2", verifier) for verifier in ("topk", "rrs", "greedy")]
    assert all(tree.drafts is None and torch.equal(tree.tokens, trees[0].tokens) for tree in trees)
    assert trees[0].tokens[1:4].tolist() == draft_logits(table, ()).topk(3).indices.tolist()


def test_nothing_is_drafted_before_anything_was_observed(table):
    model, head = table
    fresh = TreeDrafter(EagleProposer(head, model), parse_policy("eagle"), SCHEMES["topk"])
    assert draft_tree(fresh, torch.tensor([3]), SamplingParams(), torch.Generator()).tokens.tolist() == [3]
