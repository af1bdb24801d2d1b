"""What a run that goes on keeps, what it does where numbers are not finite, and what it refuses in a line."""

import re
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from commands import complains
from models import random_head, same_weights, target
from training import (
    checkpoint_of,
    files_of,
    files_of_at_most,
    find_feature_shard,
    flip_bit,
    folder_of,
    kill_at,
    load_weights,
    metrics_of,
    read_refusal,
    same_head,
    train_to_end,
    train_until_killed,
    with_folder,
    write_data,
)
from transformers import AutoTokenizer

from treespec.api.load import load
from treespec.files.atomic import hash_tensors, read_json, read_tensors, write_json, write_tensors
from treespec.heads.checkpoint import load_head
from treespec.heads.folder import find_head_folder
from treespec.train.checkpoints import find_latest_step, list_checkpoints
from treespec.train.data.batches import Forward, iterate_forwards, share_position_counts, split_epoch
from treespec.train.loop.run import check_head_weights
from treespec.train.run import train


def steps_in(config):
    return [step for step, _ in list_checkpoints(folder_of(config))]


def test_without_a_damaged_checkpoint_the_one_before_is_used(config):
    whole = train_to_end(with_folder(config, "whole"))
    assert steps_in(whole) == [6, 4]
    train_until_killed(config, 5)
    assert steps_in(config) == [4, 2]
    checkpoint = checkpoint_of(config, 4)
    flip_bit(checkpoint / "optimizer.safetensors", 0.7)
    assert f"delete {checkpoint}, and the same command goes on" in read_refusal(config)
    shutil.rmtree(checkpoint)
    assert same_head(train_to_end(config), whole)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_share_each_batch_from_any_step_on(processes):
    lengths = [5] * 41

    def batches_of(epoch):
        return split_epoch(lengths, 2 * processes, 3, epoch)

    run = [batch for epoch in range(3) for batch in batches_of(epoch)]
    each = [list(islice(iterate_forwards(6, batches_of, process, processes), 9)) for process in range(processes)]
    for number, parts in enumerate(zip(*each, strict=True), 6):
        assert {part.batch for part in parts} == {number}
        assert sorted(i for part in parts for i in part.conversations) == sorted(run[number])


def test_losses_are_divided_by_the_positions_of_all_forwards_of_a_step():
    """Two positions of draft step 1 and one of step 2 here, six and five in another forward or process."""
    masks = [torch.tensor([0, 0] + [1] * count).bool() for count in (2, 6)]
    in_another_process = share_position_counts(iter([Forward(0, [0], [0, 1])]), 1, 2, masks)
    in_another_forward = share_position_counts(iter([Forward(0, [0], [0]), Forward(1, [1], [1])]), 2, 1, masks)
    for forward in (*in_another_process, *in_another_forward):
        assert forward.position_counts[:3] == (4.0, 3.0, 2.0)


def test_a_run_of_other_processes_is_refused(config):
    train_until_killed(config)
    record = folder_of(config) / "config.json"
    write_json(record, read_json(record, "") | {"processes": 2})
    assert "holds a run with processes = 2, not 1" in read_refusal(config)


MAY_CHANGE = {
    "max_steps": 8,
    "epochs": 3,
    "validate_every": 5,
    "validate_on": 2,
    "checkpoint_every": 1,
    "decode_on": 1,
}


def test_what_may_change_on_resume_does_and_the_rest_is_named(config):
    train_until_killed(config)
    for name, value in {"learning_rate": 0.1, "noise": 0.5, "held_out": 0.3, "grow_at": 0.1}.items():
        assert f"holds a run with {name} = " in read_refusal(config, **{name: value})
    train_to_end(config, **MAY_CHANGE)
    assert steps_in(config) == [8, 7]


def test_a_finished_run_goes_on_where_it_is_given_more_steps(config):
    read_refusal(config, data="nowhere.jsonl", learning_rate=1e-2)  # writes nothing that the next run must agree with
    train_to_end(config)
    first = load_weights(train_to_end(config, max_steps=7))
    assert steps_in(config) == [7, 6]
    train(replace(config, max_steps=7, validate_on=3), kill_at(7))  # no step is left
    assert same_weights(first, load_weights(config))


def test_a_checkpoint_of_a_run_that_goes_on_is_a_head(config):
    train_until_killed(config)
    assert load_head(checkpoint_of(config)).fc.weight.dtype == torch.float32
    assert find_head_folder(config.out) == checkpoint_of(config)
    spec = load(config.target, config.out, "chain:3", "topk", dtype="float32")
    assert spec.generate("question 001", max_new_tokens=12, temperature=0.0).stats.drafted[0] > 0


@pytest.fixture
def stored(config, tmp_path):
    """A run that has stored its features, and not begun to train."""
    config = replace(config, features=f"{tmp_path}/features")
    train_until_killed(with_folder(config, "first"), 1)
    return config


def spoil(config, numbers=None):
    """Make the features of some conversations infinite, as a target that overflows gives them."""
    shard = find_feature_shard(config)
    tensors, about = read_tensors(shard, "")
    for name in map(str, tensors if numbers is None else numbers):
        tensors[name][1:, :4] = torch.inf
        about[name] = hash_tensors({"": tensors[name]}, {})
    write_tensors(shard, tensors, about)
    return len(tensors)


def test_a_bad_step_is_skipped_and_counted_and_resuming_stays_exact(stored):
    count = spoil(stored, [])
    spoil(stored, split_epoch([1] * count, stored.batch_size, stored.seed, 0)[3])
    whole = train_to_end(with_folder(stored, "whole"))
    assert all(value.isfinite().all() for value in load_weights(whole).values())
    assert [line for line in metrics_of(whole) if "skipped" in line] == [{"step": 4, "skipped": 1}]
    assert find_latest_step(folder_of(whole)) == 6
    for step in (3, 5):
        train_until_killed(stored, step)
        assert find_latest_step(folder_of(stored)) == 2  # that of step 4 would follow a bad step
    assert same_head(train_to_end(stored), whole)


def test_many_bad_steps_end_the_run_at_the_last_good_checkpoint(stored):
    stored = train_until_killed(replace(stored, max_steps=100))
    kept = files_of(checkpoint_of(stored))
    spoil(stored)
    complaint = r"not finite since step 3; the checkpoint of step 2 is kept in .*training"
    assert re.search(complaint, read_refusal(stored))
    assert files_of(checkpoint_of(stored)) == kept
    short = with_folder(stored, "short", max_steps=6)
    assert "not finite since step 1; no checkpoint was written" in read_refusal(short)
    assert not checkpoint_of(short).exists()
    assert not list(Path(stored.out).parent.glob("*/model.safetensors"))


def test_weights_that_are_not_finite_are_never_saved(stored, tmp_path):
    head = random_head(target("llama"))
    check_head_weights(head, "the head", tmp_path / "none")
    with torch.no_grad():
        next(p for p in head.parameters() if p.requires_grad).view(-1)[0] = torch.nan
    with complains("the weights of the head are not finite; no checkpoint was written"):
        check_head_weights(head, "the head", tmp_path / "none")


def test_without_held_out_conversations_no_numbers_are_made_up(config, tmp_path, capsys):
    same = tmp_path / "same.jsonl"
    same.write_text("\n".join(Path(config.data).read_text().splitlines()[:1] * 4))
    result = train(replace(config, data=str(same), max_steps=1, calibrate=True))
    said = capsys.readouterr().out
    assert "none is held out, so the head is neither validated nor calibrated" in said
    assert "\nNot validated: no conversation is held out\n" in said
    assert "- not validated: no conversation is held out" in Path(config.out, "README.md").read_text()
    assert "top-1 agreement" not in said
    assert str(result) == "not validated"


def test_a_token_that_the_target_lacks_is_one_line(config, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["zyx"])
    tokenizer.save_pretrained(folder)
    config = train_to_end(config, target=str(folder), max_steps=1)  # the token does not occur
    data = write_data(tmp_path / "more.jsonl", name="zyx")
    assert "the target has" in read_refusal(with_folder(config, "other"), data=str(data))


def test_a_full_disk_is_one_line_and_the_checkpoint_before_still_good(config, tmp_path):
    train_until_killed(config, 1)
    assert find_latest_step(folder_of(config)) is None
    train_until_killed(config, 3)
    third = with_folder(config, "3")
    folder_of(third).mkdir(parents=True)
    (folder_of(third) / "metrics.jsonl").write_text('{"step": 0}\n' * 1000)
    with files_of_at_most(4096):
        assert "model.safetensors: " in read_refusal(config)
        features = f"{tmp_path}/features"
        assert "features-00000.safetensors: " in read_refusal(with_folder(config, "2", features=features))
        assert "metrics.jsonl: " in read_refusal(third)
    assert not list(tmp_path.rglob("*.tmp"))
    assert find_latest_step(folder_of(config)) == 2
    assert same_head(train_to_end(config), train_to_end(with_folder(config, "whole")))


def test_a_disk_that_is_full_at_the_end_leaves_no_half_head(config):
    with files_of_at_most(4096):
        read_refusal(replace(config, checkpoint_every=100))
    assert not list(Path(config.out).glob("*.safetensors"))
    train(config)
