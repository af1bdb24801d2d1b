"""What a run starts from and what it trains: a trained head's weights, frozen outputs, dropout that ends with it."""

from dataclasses import replace

import pytest
import torch
from models import random_head, target
from safetensors.torch import load_file
from torch import nn
from training import Killed, checkpoint_of, kill_at, same_weights, small_run, weights, write_data

from treespec.draft.trained.kinds import KINDS
from treespec.draft.vocabulary import load_vocabulary, restrict
from treespec.errors import InputError
from treespec.heads.checkpoint import load_head, save_head
from treespec.model.target import Target
from treespec.train.run import train
from treespec.train.start import drop_out, start_from


@pytest.fixture
def config(model_folder, tmp_path):
    return small_run(model_folder, write_data(tmp_path / "data.jsonl"), tmp_path / "head")


def test_a_head_that_drafts_other_tokens_gives_the_rows_that_both_draft(model_folder, tmp_path):
    model = Target.load(str(model_folder), dtype="float32")
    trained, fresh = KINDS["eagle3"].new(model), KINDS["eagle3"].new(model)
    with torch.no_grad():
        trained.lm_head.weight += 1
    restrict(trained, model, torch.arange(10, 50))
    restrict(fresh, model, torch.arange(30, 90))
    save_head(trained, tmp_path)
    before = fresh.lm_head.weight.clone()
    start_from(str(tmp_path), fresh)
    assert torch.equal(fresh.lm_head.weight[:20], trained.lm_head.weight[20:])
    assert torch.equal(fresh.lm_head.weight[20:], before[20:])
    assert torch.equal(fresh.fc.weight, trained.fc.weight)


def test_a_head_without_a_bias_starts_one_with_a_bias_of_nothing(model_folder, tmp_path):
    model = Target.load(str(model_folder), dtype="float32")
    plain, biased = KINDS["eagle"].new(model, bias=False), KINDS["eagle"].new(model)
    save_head(plain, tmp_path)
    start_from(str(tmp_path), biased)
    assert not biased.fc.bias.any()
    assert torch.equal(biased.fc.weight, plain.fc.weight)


def test_a_run_that_goes_on_from_a_head_drafts_its_tokens_unless_others_are_asked_for(config, tmp_path):
    first = replace(config, draft_vocab=40, max_steps=1)
    train(first)
    beside = load_vocabulary(first.out, 290)
    assert len(beside) == 40
    for number, drafted in ((None, beside.tolist()), (30, 30), (0, None)):
        further = replace(first, out=str(tmp_path / f"further-{number}"), from_head=first.out, draft_vocab=number)
        train(further)
        found = load_vocabulary(further.out, 290)
        assert drafted == (found if found is None else found.tolist() if number is None else len(found))


def test_a_head_of_another_width_is_named(config, tmp_path):
    other = target("llama")
    save_head(random_head(other), tmp_path / "other")
    with pytest.raises(InputError, match=r"--from-head .*other is for another target: its vocab_size is 64, not 290"):
        train(replace(config, from_head=str(tmp_path / "other")))


def test_a_frozen_output_stays_the_targets_and_the_rest_is_trained(config, tmp_path):
    frozen = replace(config, head="eagle3", freeze_output=True, draft_vocab=40, max_steps=3, save_dtype="float32")
    train(frozen)
    head, rows = load_head(frozen.out), Target.load(frozen.target, dtype="float32").model.get_output_embeddings().weight
    assert torch.equal(head.lm_head.weight, rows[head.vocabulary])
    assert not any("lm_head" in name for name in load_file(checkpoint_of(frozen) / "optimizer.safetensors"))
    killed = replace(frozen, out=str(tmp_path / "killed"))
    with pytest.raises(Killed):
        train(killed, kill_at(3))
    train(killed)
    assert same_weights(weights(killed), weights(frozen))
    with pytest.raises(InputError, match="--freeze-output is for --head eagle3"):
        train(replace(config, out=str(tmp_path / "eagle"), freeze_output=True))


def test_dropout_is_where_the_published_hydra_plus_has_it_and_names_stay(model_folder):
    model = Target.load(str(model_folder), dtype="float32")
    head = KINDS["hydra++"].new(model)
    names = set(head.state_dict())
    drop_out(head, 0.2)
    drops = [name for name, part in head.named_modules() if isinstance(part, nn.Dropout)]
    assert len(drops) == head.max_depth * (head.blocks + 1)
    assert {"hydra_mlp.0.0", "hydra_lm_head.3.0"} <= set(drops)
    assert set(head.state_dict()) == names


def test_a_killed_run_with_dropout_goes_on_to_the_same_head_and_drafts_without(config, tmp_path):
    whole = replace(config, head="hydra++", draft_heads=2, out=str(tmp_path / "whole"), max_steps=4)
    killed, none = replace(whole, out=str(tmp_path / "killed")), replace(whole, out=str(tmp_path / "none"), dropout=0.0)
    train(whole)
    with pytest.raises(Killed):
        train(killed, kill_at(3))
    train(killed)
    train(none)
    assert same_weights(weights(killed), weights(whole))
    assert not same_weights(weights(none), weights(whole))
    assert not [part for part in load_head(whole.out).modules() if isinstance(part, nn.Dropout)]
