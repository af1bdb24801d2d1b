"""What a run that goes on keeps: an intact checkpoint, the order of conversations, and the options that matter."""

import json
import re
from dataclasses import replace
from itertools import chain, islice

import pytest
import torch
from refusals import complains
from training import (
    beside,
    checkpoint_of,
    flipped,
    folder_of,
    kill_at,
    killed,
    refused,
    same_weights,
    trained,
    weights,
)

from treespec.api.load import load
from treespec.files.atomic import read_json, read_tensors, write_json, write_tensors
from treespec.heads.checkpoint import load_head
from treespec.heads.folder import head_folder
from treespec.train.checkpoints import all_in
from treespec.train.data.batches import forwards
from treespec.train.loop import steps as gradient
from treespec.train.loop.steps import forwards_each
from treespec.train.run import train


def steps_in(config):
    return [step for step, _ in all_in(folder_of(config))]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "config.json"])
def test_of_two_checkpoints_a_damaged_one_is_named_and_the_one_before_is_used(config, capsys, name):
    whole = trained(beside(config, "whole"))
    assert steps_in(whole) == [6, 4]
    killed(config, 5)
    assert steps_in(config) == [4, 2]
    file = checkpoint_of(config, 4) / name
    flipped(file, 0.7)
    capsys.readouterr()
    trained(config)
    said = [line for line in capsys.readouterr().out.splitlines() if "going on from step 2" in line]
    assert [str(file) in line for line in said] == [True]
    assert same_weights(weights(config), weights(whole))
    flipped(checkpoint_of(config, 6) / "optimizer.safetensors", 0.7)
    flipped(file, 0.7)
    complaint = rf"checkpoint-000006.*checkpoint-000004.*; delete {folder_of(config)}"
    assert re.search(complaint, refused(config, max_steps=8))


def test_checkpoints_of_a_time_that_was_gone_back_on_go(config):
    killed(config, 5)
    flipped(checkpoint_of(config, 4) / "model.safetensors", 0.7)
    killed(replace(config, checkpoint_every=3), 3)
    assert steps_in(config) == [3, 2]


@pytest.mark.parametrize("began", [1, 2, 3, 4])
def test_all_numbers_of_processes_make_the_same_forwards(began):
    """Six batches a step, from the second step on."""
    lengths, count = [5] * 41, 6 * began
    step = list(islice(forwards(6, lengths, 2 * began, 3, began), 2 * count))
    assert [forward.batch for forward in step[::began]] == list(range(6, 18))
    batch = sorted(number for forward in step[:began] for number in forward.conversations)
    assert len(set(batch)) == 2 * began
    for processes in range(1, count + 1):
        if count % processes:
            with complains(rf"began with {began} processes .* not {processes}"):
                forwards_each(count, began, processes)
            continue
        each = [list(islice(step, process, None, processes)) for process in range(processes)]
        share = forwards_each(count, began, processes)
        for number in range(2):
            own = [mine[number * share : (number + 1) * share] for mine in each]
            assert sorted(chain.from_iterable(own)) == sorted(step[number * count : (number + 1) * count])


def test_a_run_of_two_processes_goes_on_with_one_to_the_same_weights(config, monkeypatch):
    """Two processes of 2 conversations each had the order and the mean gradient of one with 4: float32, 1e-5."""
    begun = replace(config, batch_size=4, noise=0.0)
    whole = trained(beside(begun, "whole"))
    killed(begun)
    file, record = checkpoint_of(begun) / "optimizer.safetensors", folder_of(begun) / "config.json"
    tensors, about = read_tensors(file, "")
    write_tensors(file, tensors, {"place": json.dumps(json.loads(about["place"]) | {"processes": 2})})
    write_json(record, read_json(record, "") | {"batch_size": 2})

    sizes, original = [], gradient.loss_of

    def noted(run, forward, *rest):
        sizes.append(len(forward.conversations))
        return original(run, forward, *rest)

    monkeypatch.setattr(gradient, "loss_of", noted)
    trained(begun, batch_size=2)
    assert sizes == [2] * 8
    for name, value in weights(whole).items():
        assert torch.allclose(value, weights(begun)[name], atol=1e-5), name


MAY_CHANGE = {
    "max_steps": 8,
    "epochs": 3,
    "validate_every": 5,
    "validate_on": 2,
    "checkpoint_every": 1,
    "decode_on": 1,
    "patience": 50,
}


def test_what_may_change_on_resume_does_and_the_rest_is_named(config):
    killed(config)
    for name, value in {"learning_rate": 0.1, "noise": 0.5, "held_out": 0.3, "grow_at": 0.1}.items():
        assert f"holds a run with {name} = " in refused(config, **{name: value})
    trained(config, **MAY_CHANGE)
    assert steps_in(config) == [8, 7]


def test_a_finished_run_goes_on_where_it_is_given_more_steps(config):
    refused(config, data="nowhere.jsonl", learning_rate=1e-2)  # writes nothing that the next run must agree with
    trained(config)
    first = weights(trained(config, max_steps=7))
    assert steps_in(config) == [7, 6]
    train(replace(config, max_steps=7, validate_on=3), kill_at(7))  # no step is left
    assert same_weights(first, weights(config))


def test_a_checkpoint_of_a_run_that_goes_on_is_a_head(config):
    killed(config)
    assert load_head(checkpoint_of(config)).fc.weight.dtype == torch.float32
    assert head_folder(config.out) == checkpoint_of(config)
    spec = load(config.target, config.out, "chain:3", "topk", dtype="float32")
    assert spec.generate("question 001", max_new_tokens=12, temperature=0.0).stats.drafted[0] > 0
