"""Block heads that train on sampled rows: the same losses and gradients as of these rows out of all."""

import copy
from itertools import pairwise

import pytest
import torch
from drafters import build_dflash, build_p_eagle
from models import CONFIGS, random_model, seeded
from torch.autograd.graph import saved_tensors_hooks
from training import config_without_files

from treespec.heads.sampled_rows import SampledRows
from treespec.model.target import Target
from treespec.train.budget import TrainingSize, choose_recipe, spread_aux_layers
from treespec.train.data.anchors import RowSampling, draw_rows
from treespec.train.data.batches import Forward, share_position_counts
from treespec.train.losses.objectives import TrainingBatch
from treespec.train.recipes import TRAINING_BY_KIND

WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
HEADS = {
    "dflash": (build_dflash, {}),
    "dflash with windows": (build_dflash, WINDOW),
    "dflash without causality": (build_dflash, WINDOW | {"sliding_window": 2, "causal": [False, False]}),
    "dspark": (build_dflash, {"kind": "dspark"}),
    "domino": (build_dflash, {"kind": "domino"}),
    "p-eagle": (build_p_eagle, {"num_hidden_layers": 2}),
    "p-eagle with windows": (build_p_eagle, {"num_hidden_layers": 2} | WINDOW),
}
MODEL = Target(copy.deepcopy(random_model(CONFIGS["llama"]())).double())
TOKENS = 14
ROWS = TOKENS - 2


def build_head(name):
    make, changes = HEADS[name]
    return copy.deepcopy(make(**{"own_output": True} | changes)).double()  # the embedding is shared


def build_batch(head, sample=None):
    """Two conversations of random tokens and features, in float64."""
    generator = seeded(2)
    tokens = torch.randint(3, 60, (2, TOKENS), generator=generator)
    loss_mask = torch.rand(2, TOKENS, generator=generator, dtype=torch.float32) < 0.6
    width = head.feature_size + head.hidden_size
    features = torch.randn(2, TOKENS, width, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([TOKENS, TOKENS])
    return TrainingBatch(tokens, loss_mask, features, lengths, generator, head.max_depth, sample=sample)


def compute_loss(head, batch):
    """The loss, and the gradients of all weights."""
    head.zero_grad()
    objective = TRAINING_BY_KIND[head.kind].load_objective()
    loss = objective(config_without_files(head=head.kind), MODEL, head, batch)
    loss.total.backward()
    return loss, [weight.grad.clone() for weight in head.parameters() if weight.grad is not None]


def draw_order():
    generator = seeded(5)
    return torch.stack([torch.randperm(ROWS, generator=generator) for _ in range(2)])


@pytest.mark.parametrize("name", HEADS)
def test_with_every_row_sampled_losses_and_gradients_are_those_of_all_rows(name):
    """With recomputation too."""
    head = build_head(name)
    expected, slopes = compute_loss(head, build_batch(head))
    head.recompute = True
    every_row = SampledRows.from_sizes(draw_order(), torch.full((head.max_depth, 2), ROWS))
    found, sampled_slopes = compute_loss(head, build_batch(head, every_row))
    assert float(found.total.detach()) == pytest.approx(float(expected.total.detach()), rel=1e-6)
    assert len(slopes) == len(sampled_slopes) > 0
    for slope, wanted in zip(sampled_slopes, slopes, strict=True):
        assert (slope - wanted).norm() <= 1e-6 * wanted.norm()


@torch.no_grad()
@pytest.mark.parametrize("name", HEADS)
def test_sampled_states_are_those_rows_out_of_the_full_computation(name):
    """Texts with different numbers of rows; P-EAGLE's first level has every row."""
    head = build_head(name)
    sizes = torch.tensor([[7, 2]] * head.max_depth)
    if head.kind == "p-eagle":
        sizes = torch.tensor([[ROWS, ROWS], [7, 3], [5, 2], [3, 1]])
    sample = SampledRows.from_sizes(draw_order(), sizes)
    batch = build_batch(head, sample)
    features = batch.features[:, :-2, : head.feature_size]
    embed = MODEL.embed_tokens
    full = head(batch.tokens, features, torch.ones_like(batch.counts), head.max_depth, embed)
    found = head(batch.tokens, features, batch.counts, head.max_depth, embed, sample)
    for level, (states, of_every_row) in enumerate(zip(found, full, strict=True)):
        rows = of_every_row.unflatten(0, (2, ROWS - level))
        expected = [of_every_row[:0]]
        for text in range(2):
            for row in sorted(sample.order[text, : sizes[level, text]].tolist()):
                if row + level < ROWS and batch.counts[text, row + level]:
                    expected.append(rows[text, row][None])
        torch.testing.assert_close(states, torch.cat(expected), rtol=1e-6, atol=1e-9)
        assert int(sample.mark_reached(batch.counts, level).sum()) == len(states)


def test_rows_by_a_ratio_are_nested_and_those_by_anchors_the_same():
    mask = torch.arange(60) >= 20
    levels = 6
    by_ratio = draw_rows(mask, RowSampling(levels, ratio=0.7), 3, 1)
    by_anchors = draw_rows(mask, RowSampling(levels, anchors=9), 3, 1)
    few = draw_rows(mask, RowSampling(levels, anchors=100), 3, 1)
    assert by_ratio.sizes[:, 0].tolist() == [58, 32, 23, 16, 11, 8]  # of 45 rows with a draft that counts
    assert by_anchors.sizes[:, 0].tolist() == [9] * levels
    assert few.sizes[:, 0].tolist() == [45] * levels
    for sample in (by_ratio, by_anchors, few):
        drafting = [set(sample.list_rows(level)[0].tolist()) for level in range(levels)]
        assert all(later <= earlier for earlier, later in pairwise(drafting))
        assert drafting[1] <= set(range(13, 58))


def test_a_sample_follows_from_seed_batch_and_conversation():
    mask = torch.ones(40, dtype=torch.bool)

    def draw(batch, conversation, seed=0):
        return draw_rows(mask, RowSampling(2, anchors=5, seed=seed), batch, conversation).order.tolist()

    assert draw(3, 1) == draw(3, 1)
    assert len({str(draw(*place)) for place in ((3, 1), (4, 1), (3, 2), (3, 1, 1))}) == 4


def test_losses_are_divided_by_the_positions_that_samples_reach():
    masks = [torch.ones(20, dtype=torch.bool), torch.ones(9, dtype=torch.bool)]
    sampling = RowSampling(2, anchors=3)
    (forward,) = share_position_counts(iter([Forward(0, [0, 1], [0, 1])]), 1, 1, masks, sampling)
    counts = torch.stack([torch.ones(18, dtype=torch.bool), torch.arange(18) < 7])
    reached = [int(forward.sample.mark_reached(counts, level).sum()) for level in range(2)]
    assert forward.position_counts[:3] == (*reached, 0.0)
    assert reached[0] == 6


def test_anchors_and_recomputation_keep_less_for_the_backward_pass():
    head = build_head("dflash")
    order = torch.arange(ROWS).expand(2, -1)
    kept = []
    for anchors, recompute in ((ROWS, False), (3, False), (3, True)):
        head.recompute = recompute
        sample = SampledRows.from_sizes(order, torch.full((head.max_depth, 2), anchors))
        sizes = {}

        def keep(tensor, sizes=sizes):
            sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        weights = {weight.untyped_storage()._cdata for weight in head.parameters()}
        batch = build_batch(head, sample)
        features = batch.features[:, :-2, : head.feature_size]
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            head(batch.tokens, features, batch.counts, head.max_depth, MODEL.embed_tokens, sample)
        kept.append(sum(size for key, size in sizes.items() if key not in weights))
    assert kept[1] < kept[0] / 2
    assert kept[2] < kept[1] / 4


def test_a_published_run_takes_the_published_shape():
    size = TrainingSize(conversations=10, tokens=10_000, vocab_size=151_936, on_cpu=False, layers=36)
    chosen = choose_recipe(config_without_files(head="dflash"), size)
    assert (chosen.head_layers, chosen.anchors) == (5, 512)
    assert chosen.hyperparameters.unrolled_steps == 15
    assert chosen.aux_layers == "2,10,18,26,34"
    chosen = choose_recipe(config_without_files(head="p-eagle", head_layers=2), size)
    assert (chosen.head_layers, chosen.down_sample_ratio, chosen.anchors) == (2, 0.7, None)
    by_budget = choose_recipe(config_without_files(head="dflash", recipe="budget"), size)
    assert (by_budget.head_layers, by_budget.anchors, by_budget.aux_layers) == (None, None, None)
    assert [spread_aux_layers(layers, 5) for layers in (1, 3, 6)] == [[1], [2], [2, 3, 4]]
