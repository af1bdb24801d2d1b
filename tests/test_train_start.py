"""What a run starts from, what it trains, and its clock: by steps or minutes it warms up, grows and decays alike."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from models import random_head, target
from torch import nn
from training import config_without_files, read_refusal, same_head, train_to_end, with_folder, write_data

from treespec.draft.vocabulary import load_vocabulary
from treespec.heads.checkpoint import load_head, save_head
from treespec.model.target import Target
from treespec.text.conversations import read_conversations
from treespec.text.encoding import encode_conversations
from treespec.train.config import DRAFT_VOCAB
from treespec.train.data.prepare import prepare
from treespec.train.loop.plan import Clock, compute_learning_rate, draft_steps_at
from treespec.train.machine import make_accelerator
from treespec.train.start import (
    RIDGE_SHARE,
    build_regression_sides,
    build_untrained_head,
    choose_vocabulary_size,
    fit_feature,
    start_head,
)


def test_a_warm_start_keeps_the_draft_vocabulary_unless_another_is_requested(config):
    first = train_to_end(config, draft_vocab=40, max_steps=1)
    tokens = load_vocabulary(first.out, 290).tolist()
    assert len(tokens) == 40
    for number, count in ((None, 40), (30, 30)):
        further = train_to_end(with_folder(first, f"{number}"), from_head=first.out, draft_vocab=number)
        found = load_vocabulary(further.out, 290).tolist()
        assert len(found) == count
        assert number or found == tokens
    further = train_to_end(with_folder(first, "all"), from_head=first.out, draft_vocab=0)
    assert load_vocabulary(further.out, 290) is None


def test_a_head_of_another_width_is_named(config, tmp_path):
    save_head(random_head(target("llama")), tmp_path / "other")
    complaint = r"--from-head .*other is another head: its vocab_size is 64, not 290"
    assert re.search(complaint, read_refusal(config, from_head=f"{tmp_path}/other"))


def test_a_head_without_a_bias_is_gone_on_from_without_one(config):
    bare = train_to_end(config, bias=False, max_steps=1)
    assert read_refusal(with_folder(config, "on"), from_head=bare.out).endswith("try --no-bias")


def test_dropout_is_as_in_the_published_hydra_plus_and_training_only(config):
    config = replace(config, head="hydra++", draft_heads=2, max_steps=2)
    model = Target.load(config.target, dtype="float32")
    head = build_untrained_head(config, model)
    names = set(head.state_dict())
    start_head(config, model, head, None, None)
    drops = [name for name, part in head.named_modules() if isinstance(part, nn.Dropout)]
    assert len(drops) == head.max_depth * (head.blocks + 1)
    assert {"hydra_mlp.0.0", "hydra_lm_head.1.0"} <= set(drops)
    assert set(head.state_dict()) == names
    assert not [part for part in load_head(train_to_end(config).out).modules() if isinstance(part, nn.Dropout)]


def test_it_is_the_32000_most_frequent_where_the_target_has_more():
    def size(vocab_size=DRAFT_VOCAB + 8, head="eagle3", **changes):
        return choose_vocabulary_size(
            config_without_files(head=head, **changes), SimpleNamespace(vocab_size=vocab_size)
        )

    assert size() == DRAFT_VOCAB == 32000
    assert size(draft_vocab=7) == 7
    assert size(draft_vocab=0) == size(head="eagle") == size(64) == 0


@pytest.mark.parametrize("kind, vocabulary", [("eagle", None), ("eagle3", 40)])
def test_a_run_goes_on_from_the_weights_of_another_head(config, tmp_path, kind, vocabulary):
    """With learning rate 0 they stay what they were, in more data too, and so do an EAGLE-3 head's draft tokens."""
    config = train_to_end(config, max_steps=1, head=kind, draft_vocab=vocabulary)
    more = write_data(tmp_path / "more.jsonl", count=40, name="other")
    on = {"from_head": config.out}
    still = train_to_end(with_folder(config, "still"), draft_vocab=None, learning_rate=0.0, data=str(more), **on)
    assert same_head(config, still)
    assert f"its kind is {kind}, not hydra" in read_refusal(with_folder(still, "other"), head="hydra")


@pytest.mark.parametrize("bias", [True, False])
def test_fitted_first_weights_are_the_least_squares_map_to_the_next_feature(config, bias):
    """Against torch's own solver in float64, with the same ridge, to 1e-3 of the weights' norm."""
    model = Target.load(config.target, dtype="float32")
    options = replace(config, bias=bias)
    head = build_untrained_head(options, model)
    examples, _ = encode_conversations(model.tokenizer, read_conversations(config.data)[0], None, 2048)
    data = prepare(options, model, (), examples, make_accelerator(options))
    fit_feature(head, data, seed=0)

    both = [build_regression_sides(head, data, number) for number in range(len(data.train))]
    x, y = (torch.cat(parts).double() for parts in zip(*both, strict=True))
    ridge = torch.eye(x.shape[1], dtype=x.dtype) * (RIDGE_SHARE * x.square().sum(0).mean()).sqrt()
    wanted = torch.linalg.lstsq(torch.cat([x, ridge]), torch.cat([y, y.new_zeros(len(ridge), y.shape[1])])).solution
    given = [head.fc.weight.T, *([head.fc.bias[None]] if bias else [])]
    assert (torch.cat(given).detach() - wanted).norm() < 1e-3 * wanted.norm()


PUBLISHED = {  # of Medusa and Hydra++ the commands in the README.md of FasterDecoding/Medusa and zankner/Hydra
    "eagle": {"learning_rate": 3e-5, "warm_up": 2000, "clip": 0.5, "beta2": 0.95},
    "eagle3": {"learning_rate": 5e-5, "epochs": 40, "warm_up": 12000, "weight_decay": 0.0},
    "medusa": {
        "learning_rate": 1e-3,
        "epochs": 2,
        "weight_decay": 0.0,
        "decay": "cosine",
        "batch": 128,
        "beta2": 0.999,
    },
    "hydra": {"learning_rate": 5e-4, "epochs": 10},
    "hydra++": {"learning_rate": 5e-4, "epochs": 10, "weight_decay": 0.1, "warm_up": 100, "decay": "cosine"}
    | {"batch": 32, "clip": 1.0, "beta2": 0.999, "last_rate": 0.33, "dropout": 0.2},
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_kind_has_its_published_recipe_where_nothing_is_said(kind):
    assert PUBLISHED[kind].items() <= vars(config_without_files(head=kind).hyperparameters).items()
    assert config_without_files(head=kind, learning_rate=0.0).hyperparameters.learning_rate == 0.0


@pytest.mark.parametrize("kind", PUBLISHED)
@pytest.mark.parametrize("warm_up", [None, 7, 10**6])
def test_minutes_and_steps_of_the_same_run_give_the_same_rates(kind, warm_up):
    """1,000 steps of 0.6 s, ended by steps or by ten minutes: the highest rate is reached, the last is the recipe's."""
    recipe = config_without_files(head=kind, warm_up=warm_up).hyperparameters
    rates = []
    by_steps = Clock(1000)
    by_minutes = Clock(10**9, minutes=10)
    for step in range(1, 1000):
        seconds = 0.6 * step
        rates.append(compute_learning_rate(recipe, by_steps, step, seconds))
        assert compute_learning_rate(recipe, by_minutes, step, seconds) == pytest.approx(rates[-1], rel=1e-6)
        grown = draft_steps_at(recipe, by_steps.measure_progress(step, seconds))
        assert grown == draft_steps_at(recipe, by_minutes.measure_progress(step, seconds))
    assert by_minutes.measure_progress(1000, 600.0) == by_steps.measure_progress(1000, 600.0) == 1
    if warm_up is None:
        assert max(rates) == pytest.approx(recipe.learning_rate, rel=1e-2)
        assert rates.index(max(rates)) <= 101
        assert rates[-1] == pytest.approx(recipe.learning_rate * recipe.last_rate, abs=2e-3 * recipe.learning_rate)


def test_a_step_has_the_recipes_batch_in_any_number_of_processes():
    for kind, batch in (("medusa", 128), ("hydra++", 32)):
        for size, processes in ((4, 1), (4, 8), (8, 4), (1, 2)):
            assert (
                config_without_files(head=kind, batch_size=size).count_forwards(processes) * size * processes == batch
            )
    assert config_without_files(batch_size=2).count_forwards(3) == 1
    assert config_without_files(head="medusa", accumulate=5).count_forwards(3) == 5
