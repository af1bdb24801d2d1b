"""Growing trees: the most likely part of all drafts, whatever verifies."""

import itertools

import pytest
import torch
from models import TableConfig, TableModel, draft_tree, follow, randn, random_head, seeded

from treespec.draft.builders import CycleBuilder
from treespec.draft.drafter import Frontier
from treespec.draft.heads.eagle import EagleProposer
from treespec.draft.models.branch import Levels
from treespec.draft.tree_drafter import TreeDrafter
from treespec.model.target import Target
from treespec.sampling.probs import SamplingParams
from treespec.trees.dynamic import DynamicTree
from treespec.trees.mask import build_ancestor_mask
from treespec.trees.policy import parse_policy
from treespec.verify.registry import SCHEMES, load_verifier
from treespec.verify.topk import TopK

TEXT = torch.tensor([1, 2, 0, 3, 1])
FEATURES = randn(5, 4, generator=seeded(0))


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


def test_a_cycle_pairs_each_feature_with_the_next_token(table, monkeypatch):
    """Five tokens as `treespec.draft.heads.base` draws them: a b c d e are 1 2 0 3 1, and x y are 2 0."""
    model, head = table
    steps = []
    forward = EagleProposer.forward

    def record(proposer, tokens, features, places, seen):
        states = forward(proposer, tokens, features, places, seen)
        steps.append((features[0], tokens[0].tolist(), states[0].clone()))
        return states

    monkeypatch.setattr(EagleProposer, "forward", record)
    proposer = EagleProposer(head, model)
    proposer.observe([FEATURES[:4]], [TEXT])
    assert proposer.states[0].tokens.tolist() == [2, 0, 3, 1]
    (logits,) = proposer.begin(TEXT[-1:], model.build_cache())
    features, tokens, states = steps[0]
    assert (features == proposer.fuse_features(FEATURES[:4])).all()
    assert tokens == [2, 0, 3, 1]
    assert torch.equal(logits[0], proposer.compute_draft_logits(states[3]))
    proposer.extend([Frontier(torch.tensor([2]), torch.tensor([0]))])
    assert torch.equal(steps[1][0], states[3:])
    assert steps[1][1] == [2]
    proposer.observe([FEATURES[3:]], [torch.tensor([1, 2, 0])])
    assert proposer.states[0].tokens.tolist() == [2, 0]
    assert proposer.cache.lengths == [4]
    proposer.rewind([2])
    assert (len(proposer.states[0]), proposer.cache.lengths) == (0, [2])


R, A, B, C, D, E, F = range(7)


def test_a_dynamic_tree_expands_and_keeps_the_best_nodes():
    """The tree that `treespec.trees.shape` draws, and the frontier of `treespec.draft.drafter`."""
    at_root = [0, 0.6, 0.3, 0.1, 0, 0, 0]
    at_a = [0.1, 0.1, 0.1, 0.4, 0.3, 0, 0]
    at_b = [0, 0, 0, 0, 0, 0.5, 0.5]
    root, below_a, below_b = torch.tensor([at_root, at_a, at_b]).log().split(1)
    greedy = SamplingParams(0.0)
    growth = DynamicTree(depth=2, topk=2, nodes=5).grow(
        CycleBuilder(torch.tensor([R]), root, greedy, seeded(0), TopK())
    )
    frontier = next(growth)
    assert frontier.tokens.tolist() == [A, B]
    assert (frontier.sibling_slots.tolist(), frontier.parent_rows.tolist()) == ([0, 1], [0, 0])
    with pytest.raises(StopIteration) as end:
        growth.send(torch.cat([below_a, below_b]))
    assert end.value.value.tokens.tolist() == [R, A, B, C, D]
    assert end.value.value.parents.tolist() == [-1, 0, 0, 1, 1]
    assert Frontier(torch.tensor([C, F]), torch.tensor([0, 3]), 2).parent_rows.tolist() == [0, 1]


def test_a_drafted_node_sees_what_its_parent_saw_and_itself():
    levels = Levels(torch.ones(1, 1, 0, dtype=torch.bool))
    levels.extend(torch.tensor([[0, 0]]))
    levels.extend(torch.tensor([[0, 0, 1]]))
    assert levels.seen[0].int().tolist() == [[1, 0, 1, 0, 0], [1, 0, 0, 1, 0], [0, 1, 0, 0, 1]]
