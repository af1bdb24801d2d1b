"""A loss or gradient that is not finite: its step is skipped, many in a row end the run, what is good is kept."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import random_head, target
from refusals import complains
from training import (
    beside,
    checkpoint_of,
    files_of,
    folder_of,
    killed,
    metrics_of,
    refused,
    same_head,
    trained,
    weights,
)

from treespec.files.atomic import digest_of_tensors, read_tensors, write_tensors
from treespec.train.checkpoints import latest_step
from treespec.train.data.batches import epoch_batches
from treespec.train.loop.run import check_weights


@pytest.fixture
def config(config, tmp_path):
    """A run that has stored its features, and not begun to train."""
    config = replace(config, features=f"{tmp_path}/features")
    killed(beside(config, "first"), 1)
    return config


def spoil(config, numbers=None):
    """Make the features of some conversations infinite, as a target that overflows gives them."""
    (shard,) = Path(config.features).rglob("*.safetensors")
    tensors, about = read_tensors(shard, "")
    for name in map(str, tensors if numbers is None else numbers):
        tensors[name][1:, :4] = torch.inf
        about[name] = digest_of_tensors({"": tensors[name]}, {})
    write_tensors(shard, tensors, about)
    return len(tensors)


def test_a_bad_step_is_skipped_and_counted_and_resuming_stays_exact(config):
    count = spoil(config, [])
    spoil(config, epoch_batches([1] * count, config.batch_size, config.seed, 0)[3])
    whole = trained(beside(config, "whole"))
    assert all(value.isfinite().all() for value in weights(whole).values())
    assert [line for line in metrics_of(whole) if "skipped" in line] == [{"step": 4, "skipped": 1}]
    assert latest_step(folder_of(whole)) == 6
    for step in (3, 5):
        killed(config, step)
        assert latest_step(folder_of(config)) == 2  # that of step 4 would follow a bad step
    assert same_head(trained(config), whole)


def test_many_bad_steps_in_a_row_end_the_run_and_keep_the_last_good_checkpoint(config):
    config = killed(replace(config, max_steps=100))
    kept = files_of(checkpoint_of(config))
    spoil(config)
    complaint = r"not finite since step 3; the checkpoint of step 2 is kept in .*training"
    assert re.search(complaint, refused(config))
    assert files_of(checkpoint_of(config)) == kept
    short = beside(config, "short", max_steps=6)
    assert "not finite since step 1; no checkpoint was written" in refused(short)
    assert not checkpoint_of(short).exists()
    assert not list(Path(config.out).parent.glob("*/model.safetensors"))


def test_weights_that_are_not_finite_are_never_saved(config, tmp_path):
    head = random_head(target("llama"))
    check_weights(head, "the head", tmp_path / "none")
    with torch.no_grad():
        next(p for p in head.parameters() if p.requires_grad).view(-1)[0] = torch.nan
    with complains("the weights of the head are not finite; no checkpoint was written"):
        check_weights(head, "the head", tmp_path / "none")
