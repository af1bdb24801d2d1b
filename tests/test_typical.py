"""Typical acceptance: which draws pass, by hand."""

import math

import pytest
import torch
from enumeration import law
from models import TableConfig, TableModel, random_head

from treespec.api.spec import Spec
from treespec.model.target import Target
from treespec.shaping.sampling import SamplingParams, probs
from treespec.trees.tree import Draws
from treespec.verify.topk import Typical


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


def test_a_threshold_below_everything_makes_sampled_text_that_of_the_draft():
    """With epsilon next to 0 every likely first child is accepted: a chain is kept whole, unlike under topk."""
    model = Target(TableModel(TableConfig(4, seed=1)))
    head = random_head(model, seed=2)
    loose = Spec(model, head, "chain:3", "typical:epsilon=1e-9", allow_lossy=True)
    out = loose.generate([1, 2], temperature=1.0, max_new_tokens=40, seed=0)
    law_of_last = probs(model.model(torch.tensor([[1, 2, *out.token_ids]])).logits[0], SamplingParams(1.0))
    assert law_of_last.min() > 1e-9
    assert out.stats.accepted[1:-1] == [3] * (len(out.stats.accepted) - 2)
