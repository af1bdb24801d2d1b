"""What a run that goes on keeps: its checkpoint, the order of conversations, and the options that matter."""

import shutil
from dataclasses import replace
from itertools import islice

import pytest
import torch
from training import (
    beside,
    checkpoint_of,
    flipped,
    folder_of,
    kill_at,
    killed,
    refused,
    same_head,
    same_weights,
    trained,
    weights,
)

from treespec.api.load import load
from treespec.files.atomic import read_json, write_json
from treespec.heads.checkpoint import load_head
from treespec.heads.folder import head_folder
from treespec.train.checkpoints import all_in
from treespec.train.data.batches import epoch_batches, forwards
from treespec.train.run import train


def steps_in(config):
    return [step for step, _ in all_in(folder_of(config))]


def test_without_a_damaged_checkpoint_the_one_before_is_used(config):
    whole = trained(beside(config, "whole"))
    assert steps_in(whole) == [6, 4]
    killed(config, 5)
    assert steps_in(config) == [4, 2]
    checkpoint = checkpoint_of(config, 4)
    flipped(checkpoint / "optimizer.safetensors", 0.7)
    assert f"delete {checkpoint}, and the same command goes on" in refused(config)
    shutil.rmtree(checkpoint)
    assert same_head(trained(config), whole)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_share_each_batch_from_any_step_on(processes):
    lengths = [5] * 41

    def batches_of(epoch):
        return epoch_batches(lengths, 2 * processes, 3, epoch)

    run = [batch for epoch in range(3) for batch in batches_of(epoch)]
    each = [list(islice(forwards(6, batches_of, process, processes), 9)) for process in range(processes)]
    for number, parts in enumerate(zip(*each, strict=True), 6):
        assert {part.batch for part in parts} == {number}
        assert sorted(i for part in parts for i in part.conversations) == sorted(run[number])


def test_a_run_of_other_processes_is_refused(config):
    killed(config)
    record = folder_of(config) / "config.json"
    write_json(record, read_json(record, "") | {"processes": 2})
    assert "holds a run with processes = 2, not 1" in refused(config)


MAY_CHANGE = {
    "max_steps": 8,
    "epochs": 3,
    "validate_every": 5,
    "validate_on": 2,
    "checkpoint_every": 1,
    "decode_on": 1,
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
