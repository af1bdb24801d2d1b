"""EAGLE-4's second stage: the low-rank head begins as an SVD, learns the output layer's drafts, and is counted."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from drafters import EIGHT_LAYERS
from models import close, randn, random_eagle3, same_weights, seeded
from training import batch_of, config_without_files, load_weights, read_refusal, train_to_end, with_folder

from treespec.heads.checkpoint import load_head
from treespec.train.candidates import freeze_layer, measure_recall
from treespec.train.recipes import TRAINING_BY_KIND

FACTORS = ("efficient_lm_head.weight", "efficient_lm_head_down_proj.weight")
TEXT = torch.arange(3, 43)


def random_eagle4(rank=6, count=5):
    """Of random weights, with an output layer far from the target's."""
    sizes = {"rank": rank, "num_candidates": count}
    return random_eagle3(EIGHT_LAYERS, kind="eagle4", candidate_head=sizes, sliding_window=4)


def multiply(head):
    """[V, H] the product of the low-rank head's factors."""
    return (head.efficient_lm_head.weight @ head.efficient_lm_head_down_proj.weight).detach()


@pytest.mark.parametrize("rank", [1, 6, 32])
def test_the_low_rank_head_begins_as_the_truncated_svd(rank):
    """Against torch's own in float64, to 1e-5; rank 32 is the output layer itself."""
    head = random_eagle4(rank)
    head.start_candidates()
    left, scales, right = torch.linalg.svd(head.lm_head.weight.detach().double(), full_matrices=False)
    close(multiply(head).double(), (left[:, :rank] * scales[:rank]) @ right[:rank], 1e-5)
    rows, columns = (weight.detach().norm() for weight in head.candidate_weights)
    assert float(rows) == pytest.approx(float(columns), rel=1e-4)


def test_with_moments_the_logits_of_the_states_are_as_near_as_a_rank_allows():
    """Their squared error is the sum of the squares of the singular values that are left out."""
    head = random_eagle4()
    states = randn(500, 32, generator=seeded(3)).double() @ torch.diag(torch.logspace(0, -2, 32).double())
    head.start_candidates(states.T @ states / len(states))
    wanted = states @ head.lm_head.weight.detach().double().T
    error = (states @ multiply(head).double().T - wanted).square().sum()
    assert float(error) == pytest.approx(float(torch.linalg.svdvals(wanted)[6:].square().sum()), rel=1e-3)


def test_output_rows_of_a_lower_rank_leave_no_number_that_is_not_finite():
    head = random_eagle4(8)
    head.lm_head.weight.data[:, 4:] = 0
    head.start_candidates()
    close(multiply(head), head.lm_head.weight.detach(), 1e-5)


def compute_divergence(head, batch):
    """The sum over two steps of 0.8^step times the mean forward KL from the whole output layer to the low-rank head."""
    inputs, _ = EIGHT_LAYERS.split_features(batch.features, head.aux_layers)
    total = 0.0
    for step, states in enumerate(head(batch.tokens, inputs[:, :-2], batch.counts, 2)):
        whole = head.lm_head(states).log_softmax(-1)
        low = (states @ multiply_with_gradient(head).T).log_softmax(-1)
        total = total + 0.8**step * (whole.exp() * (whole - low)).sum(-1).mean()
    return total


def multiply_with_gradient(head):
    rows, columns = head.candidate_weights
    return rows @ columns


def test_the_loss_has_the_gradient_of_the_forward_kl_at_the_low_rank_head_only():
    head = random_eagle4()
    freeze_layer(head)
    batch = batch_of(EIGHT_LAYERS, head, steps=2)
    compute_loss = TRAINING_BY_KIND["eagle4"].load_objective()
    loss = compute_loss(config_without_files(head="eagle4"), EIGHT_LAYERS, head, batch)
    loss.total.backward()
    wanted = torch.autograd.grad(compute_divergence(head, batch), head.candidate_weights)
    assert {name for name, weight in head.named_parameters() if weight.grad is not None} == {*FACTORS}
    for weight, gradient in zip(head.candidate_weights, wanted, strict=True):
        assert gradient.norm() > 1e-3
        close(weight.grad, gradient, 1e-5)
    assert {"token_1", "token_2", "agreement_1", "agreement_2"} == loss.parts.keys()


def test_a_batch_without_answer_tokens_moves_no_candidate():
    head = random_eagle4()
    freeze_layer(head)
    batch = batch_of(EIGHT_LAYERS, head, steps=2)._replace(loss_mask=torch.zeros(2, 9, dtype=torch.bool))
    compute_loss = TRAINING_BY_KIND["eagle4"].load_objective()
    loss = compute_loss(config_without_files(head="eagle4"), EIGHT_LAYERS, head, batch)
    loss.total.backward()
    assert float(loss.total.detach()) == 0
    assert all(weight.grad is not None and not weight.grad.any() for weight in head.candidate_weights)


def recall_of(head, steps=2):
    mask = torch.ones(len(TEXT), dtype=torch.bool)
    features = EIGHT_LAYERS.compute_features(TEXT[None], head.aux_layers, last=True)[0]
    return measure_recall(head, EIGHT_LAYERS, [(TEXT, mask, features)], steps)


@torch.no_grad()
def test_recall_is_1_at_full_rank_and_where_all_tokens_are_candidates():
    full = random_eagle4(32, 8)
    full.start_candidates()
    for head in (full, random_eagle4(1, 64)):
        assert recall_of(head) == ([1.0, 1.0], [1.0, 1.0])
    assert recall_of(random_eagle3(EIGHT_LAYERS)) == ([], [])


@torch.no_grad()
def test_recall_counts_likely_tokens_among_the_candidates():
    head = random_eagle4()
    inputs, _ = EIGHT_LAYERS.split_features(
        EIGHT_LAYERS.compute_features(TEXT[None], head.aux_layers, last=True), head.aux_layers
    )
    counts = torch.ones(1, len(TEXT) - 2, dtype=torch.bool)
    found = recall_of(head)
    for step, states in enumerate(head(TEXT[None], inputs[:, :-2], counts, 2)):
        kept = head.project(states[: len(TEXT) - 3]).isfinite()
        likely = head.lm_head(states[: len(TEXT) - 3]).argsort(descending=True)
        shares = [kept.gather(1, likely[:, :number]).float().mean() for number in (1, 8)]
        assert [part[step] for part in found] == pytest.approx([float(share) for share in shares])
        assert 0 < found[1][step] < 1


def test_the_second_stage_leaves_the_layer_as_it_was(config, capsys):
    layer = train_to_end(config, head="eagle3", draft_vocab=40, sliding_window=3, norm_output=True, max_steps=2)
    options = {"head": "eagle4", "from_head": layer.out, "draft_vocab": None, "norm_output": False}
    options |= {"sliding_window": None, "candidate_rank": 8, "candidates": 4, "validate_on": 2}
    still = train_to_end(with_folder(config, "still", **options), learning_rate=0.0)
    moved = train_to_end(with_folder(config, "moved", **options))
    assert re.search(
        r"candidates hold the head's most likely token [\d.]+%( [\d.]+%)+, of its", capsys.readouterr().out
    )
    result = json.loads((Path(moved.out) / "training" / "result.json").read_text())
    assert len(result["recall"]) == len(result["recall_of_few"]) == 5
    first, again, later = map(load_weights, (layer, still, moved))
    assert same_weights({name: again[name] for name in first}, first)
    assert same_weights({name: later[name] for name in first}, first)
    assert again.keys() - first.keys() == {*FACTORS}
    head = load_head(still.out)
    found = multiply(head)
    head.start_candidates()
    close(found, multiply(head), 1e-6)
    assert not torch.equal(later[FACTORS[0]], again[FACTORS[0]])
    assert head.llama.sliding_window == 3
    assert head.vocabulary.tolist() == load_head(layer.out).vocabulary.tolist()
    assert head.norm_output

    options |= {"learning_rate": 0.0, "first_weights": "fitted"}
    fitted = load_head(train_to_end(with_folder(config, "fitted", **options)).out)
    assert (multiply(fitted) - multiply(head)).abs().max() > 1e-3

    # It goes on from a second stage, too.
    on = {"head": "eagle4", "from_head": moved.out, "learning_rate": 0.0, "max_steps": 1}
    assert same_weights(load_weights(train_to_end(with_folder(config, "on", **on))), later)
    refuse = partial(read_refusal, with_folder(config, "no", **on))
    assert refuse(candidate_rank=4) == "--from-head brings rank 8: leave --candidate-rank out"
    refuse = partial(read_refusal, with_folder(config, "no", **options))
    assert refuse(candidate_rank=33).startswith("--candidate-rank is 33, and the head's states have 32 numbers")
    assert "brings the layer's window" in read_refusal(config, head="eagle4", from_head="x", sliding_window=3)
