"""Given tokens under `--verifier auto`: the part that pays, no part where none does, and the target's own text."""

import numpy as np
import pytest
import torch
from drafting import source_of
from models import CONFIGS, TableConfig, TableModel, random_model

from treespec.api.spec import Spec
from treespec.draft.cost.model import Cost
from treespec.draft.cost.running import CostModel
from treespec.draft.model_free.budget import RATES, part, rests
from treespec.draft.model_free.lookup import heaviest
from treespec.draft.model_free.one_hot import OneHotDrafter
from treespec.model.target import Target


def times(node: float) -> Cost:
    """A forward of 10 ms, and what every further node adds, in seconds."""
    nodes = (1, 2, 4, 8, 16, 32, 64)
    return Cost(nodes, tuple(0.01 + node * (n - 1) for n in nodes))


def tree():
    """Two continuations of four tokens each."""
    return heaviest(7, np.array([[1, 2, 3, 4], [5, 2, 3, 4]]), nodes=9)


def test_cheap_nodes_are_all_kept_and_dear_ones_none():
    assert len(part(tree(), CostModel(times(1e-6)))[0].tokens) == 9
    assert part(tree(), CostModel(times(0.05)))[0].tokens.tolist() == [7]


def test_what_is_kept_is_a_part_of_the_tree_with_its_own_ancestors():
    for node in (5e-4, 1e-3, 2e-3, 4e-3):
        whole, pace = tree(), CostModel(times(node))
        kept, _ = part(whole, pace)
        assert 1 <= len(kept.tokens) <= 9
        for i, parent in enumerate(kept.parents.tolist()):
            assert parent < i
            above = kept.ancestors[i].clone()
            above[i] = False
            assert torch.equal(above, kept.ancestors[parent] if parent >= 0 else torch.zeros_like(above))
            assert int(kept.depth[i]) == int(above.sum())


def test_a_drafter_that_is_always_wrong_is_left_alone_and_one_that_is_right_is_not():
    wrong, right = CostModel(times(2e-3)), CostModel(times(2e-3))
    assert not rests(wrong, 0)
    for _ in range(30):
        for pace, path in ((wrong, []), (right, [1])):
            if not rests(pace, 0):
                part(tree(), pace)
                pace.update(path)
    assert rests(wrong, 0)
    assert not rests(right, 0)
    assert wrong.by_law.factors[0, 0] < RATES[0] < right.by_law.factors[0, 0]


def test_rows_that_cost_more_than_they_can_bring_are_never_asked_for():
    assert rests(CostModel(times(1e-3)), 120)
    assert not rests(CostModel(times(1e-6)), 60)


@pytest.mark.parametrize("drafter", ["lookup", "lookahead", "jacobi", "suffix"])
@pytest.mark.parametrize("node", [1e-6, 2e-3, 0.1])
def test_greedy_text_is_the_targets_whatever_pays(drafter, node):
    target = Target(random_model(CONFIGS["llama"]()))
    source = OneHotDrafter(source_of(drafter, target).drafting.drafters[0], drafter)
    spec = Spec(target, source, times=times(node))
    prompt = [3, 4, 5, 3, 4, 5, 3, 4]
    assert (
        spec.generate(prompt, max_new_tokens=60).token_ids
        == spec.baseline().generate(prompt, max_new_tokens=60).token_ids
    )


def test_sampled_text_has_the_targets_law():
    """Frequencies of 600 second tokens of a tabular target, by χ² at 1e-4."""
    target = Target(TableModel(TableConfig(4, seed=1)))
    spec = Spec(target, source_of("lookup", target), times=times(5e-4))
    counts = torch.zeros(4)
    plain = torch.zeros(4)
    for seed in range(600):
        counts[spec.generate([1, 2, 1, 2, 1], temperature=1.0, max_new_tokens=2, seed=seed).token_ids[1]] += 1
    base = spec.baseline()
    for seed in range(600):
        plain[base.generate([1, 2, 1, 2, 1], temperature=1.0, max_new_tokens=2, seed=5000 + seed).token_ids[1]] += 1
    statistic = ((counts - plain) ** 2 / (counts + plain).clamp(min=1)).sum()
    assert statistic < 21.1  # χ² with 3 degrees of freedom, 1e-4
