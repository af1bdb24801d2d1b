"""The files of a run: damage is named, one process writes, content tells runs apart, features are stored once."""

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import complains
from models import CONFIGS, close, randn, random_model, same_weights, seeded
from safetensors import safe_open
from training import (
    Killed,
    end_process,
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
from transformers import AutoConfig

from treespec.draft.calibration import load_calibration
from treespec.files.atomic import locked, read_json, write_json
from treespec.files.downloads import cache_folder
from treespec.model.target import Target
from treespec.model.weights import load_ends
from treespec.train.data import encoded
from treespec.train.data import features as features_module
from treespec.train.data.features import StoredFeatures
from treespec.train.data.prepare import read_examples
from treespec.train.machine import make_accelerator
from treespec.train.run import train

CHECKPOINT = "checkpoint-000002"
PLACES = (0.02, 0.3, 0.7, 0.97)  # of the flipped bytes, as shares of a file: header and data


@pytest.fixture
def config(config, tmp_path):
    return replace(config, features=f"{tmp_path}/features")


@pytest.mark.parametrize("name", [f"{CHECKPOINT}/model", f"{CHECKPOINT}/optimizer", "config"])
def test_a_flipped_bit_in_what_a_run_goes_on_from_is_named(config, name):
    train_until_killed(config)
    (file,) = folder_of(config).glob(f"{name}.*")
    for place in PLACES:
        whole = flip_bit(file, place)
        assert str(file) in read_refusal(config), place
        file.write_bytes(whole)
    train(config)


def test_any_flipped_bit_in_stored_features_is_named(config):
    """Every fifth byte of the header, whose order of entries differs from one writing to the next; and some data."""
    train_until_killed(config)
    shard = find_feature_shard(config)
    with safe_open(shard, framework="pt") as file:
        numbers = range(len(file.keys()))

    def read():
        return torch.cat([*map(StoredFeatures(shard.parent).read_row, numbers)])

    assert read().isfinite().all()
    header = 8 + int.from_bytes(shard.read_bytes()[:8], "little")
    size = shard.stat().st_size
    for at in (*range(0, header, 5), (header + size) // 2, size - 1):
        whole = flip_bit(shard, (at + 0.5) / size)
        with complains(re.escape(config.features)):
            read()
        shard.write_bytes(whole)


def test_a_damaged_result_is_named_and_deleted_files_are_recreated(config):
    before = load_weights(train_to_end(config))
    result = folder_of(config) / "result.json"
    flip_bit(result, 0.5)
    assert str(result) in read_refusal(config)
    for file in (result, Path(config.out) / "model.safetensors"):
        file.unlink()
        assert same_weights(load_weights(train_to_end(config)), before)


def test_two_runs_do_not_write_into_one_folder_at_once(config):
    train_to_end(with_folder(config, "other"))
    shard = find_feature_shard(config)
    with locked(shard.parent):  # all is there: it is only read
        train_to_end(with_folder(config, "third"))
    shard.unlink()
    for folder in (folder_of(config), shard.parent):
        with locked(folder):
            assert f"{folder} is being written by process {os.getpid()}" in read_refusal(config)
    train(config)


def test_what_a_kill_left_goes_at_the_next_start(config, tmp_path):
    dead = end_process()
    train_to_end(with_folder(config, "other"))
    shard = find_feature_shard(config)
    shard.unlink()
    folder = shard.parent.relative_to(tmp_path)
    left = [f"{folder}/.{name}.{dead}.tmp" for name in ("features-00001.safetensors", shard.name)]
    left += [f"head/training/.config.json.{dead}.tmp", f"head/.model.safetensors.{dead}.tmp"]
    for name in left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("half")
    running = shard.parent / f".features-00000.safetensors.{os.getppid()}.tmp"
    running.write_text("half")
    train(config)
    assert [name for name in left if (tmp_path / name).exists()] == []
    assert running.exists()


def test_metrics_hold_each_step_once_after_a_resume(config):
    config = train_until_killed(
        replace(config, max_steps=60, checkpoint_every=30, batch_size=1), 45
    )  # after the lines of 20 and 40
    with (folder_of(config) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4')  # as a kill leaves it
    assert [line["step"] for line in metrics_of(train_to_end(config))] == [20, 40, 60]


def test_features_of_a_target_that_was_trained_again_are_others(config, tmp_path):
    model = shutil.copytree(config.target, tmp_path / "model")
    config = train_until_killed(replace(config, target=str(model)))
    train_to_end(with_folder(config, "same"))
    random_model(AutoConfig.from_pretrained(model), seed=1).save_pretrained(model)
    other = load_weights(train_to_end(with_folder(config, "other")))
    assert same_weights(other, load_weights(train_to_end(with_folder(config, "live"), features=None)))
    assert len(list(Path(config.features).iterdir())) == 2
    assert "holds a run with another content of target" in read_refusal(config)


def test_a_run_knows_its_data_by_content(config, tmp_path):
    train_until_killed(config)
    moved = Path(config.data).rename(tmp_path / "moved.jsonl")
    write_data(Path(config.data), name="something")
    assert "another content of data" in read_refusal(config)
    train_to_end(config, data=str(moved))


def test_paths_are_compared_by_where_they_lead(config, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    train_until_killed(config)
    relative = {name: os.path.relpath(getattr(config, name)) for name in ("target", "data", "out", "features")}
    train(replace(config, **relative))
    moved = Path(config.out).rename(tmp_path / "moved")
    assert train(replace(config, out=str(moved)), kill_at(1)).positions > 0  # finished


def test_records_of_another_format_and_checkpoints_without_a_record_are_refused(config):
    train_until_killed(config)
    file = folder_of(config) / "config.json"
    write_json(file, read_json(file, "") | {"format": 9})
    assert f"{file} has format 9, this treespec reads 3: delete " in read_refusal(config)
    file.unlink()
    assert f"cannot read {file}" in read_refusal(config)
    shutil.rmtree(file.parent)
    train(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_ends_of_a_target_are_those_of_the_whole(name, tmp_path):
    random_model(CONFIGS[name]()).save_pretrained(tmp_path)
    whole = Target.load(str(tmp_path))
    part = Target(load_ends(str(tmp_path)), ends=True)
    tokens = torch.arange(3, 20)
    hidden = randn(4, whole.feature_width, generator=seeded(0))
    assert torch.equal(part.embed_tokens(tokens), whole.embed_tokens(tokens))
    assert torch.equal(part.compute_output_logits(hidden), whole.compute_output_logits(hidden))
    assert (part.layers, part.dtype, part.context_length) == (whole.layers, whole.dtype, whole.context_length)
    assert (part.embed_scale, part.config.to_dict()) == (whole.embed_scale, whole.config.to_dict())
    own = sum(weight.numel() for weight in part.model.parameters())
    assert own < sum(weight.numel() for weight in whole.model.parameters()) / 2
    with pytest.raises(AttributeError):
        part.compute_features(tokens[None])


def test_a_kill_while_features_are_stored_loses_the_piece_at_hand_alone(config, monkeypatch):
    whole = train_until_killed(replace(config, features=f"{config.features}-whole"), 1)
    compute = Target.compute_features
    monkeypatch.setattr(features_module, "PIECE_SECONDS", 0.0)
    calls = []

    def compute_and_die(target, tokens, *rest, **options):
        calls.append(len(tokens))
        if len(calls) == 4:
            raise Killed
        return compute(target, tokens, *rest, **options)

    monkeypatch.setattr(Target, "compute_features", compute_and_die)
    with pytest.raises(Killed):
        train(config)
    (folder,) = Path(config.features).iterdir()
    assert len(list(folder.glob("*.safetensors"))) == sum(calls[:3])
    train_until_killed(config, 1)
    stored = StoredFeatures(folder)
    expected = StoredFeatures(find_feature_shard(whole).parent)
    count = len(expected.list_stored(0))
    assert stored.list_missing(count) == {}
    assert sum(calls) == count + calls[3] + len(StoredFeatures(next(folder.glob("held-out-*"))).list_stored(0))
    for number in range(count):
        assert torch.equal(stored.read_row(number), expected.read_row(number))


def test_with_stored_features_the_target_is_loaded_to_store_them_alone(config, capsys):
    """Validations and the calibration read stored features of held-out conversations."""
    live = train_to_end(with_folder(config, "live"), features=None)
    live_result = read_json(folder_of(live) / "result.json", "")
    train_to_end(config)
    said = capsys.readouterr().out
    assert said.count("loading the whole target") == said.count("the whole target to store its features") == 1
    assert "GiB, 128 bytes per token" in said  # 32 values in float32
    again = replace(with_folder(config, "again"), calibrate=True)
    result = train(again)
    assert result.agreement == pytest.approx(live_result["agreement"])
    assert result.positions == live_result["positions"]
    assert "loading the whole target" not in capsys.readouterr().out
    assert load_calibration(again.out).rates.keys() == {"0.01", "0.3", "0.6", "1"}
    assert same_head(again, config)
    for name, value in load_weights(live).items():
        close(value, load_weights(config)[name], 1e-5)


def test_data_that_took_long_to_encode_are_encoded_once(config, monkeypatch, tmp_path):
    """Other data, another template and another length are encoded again; a damaged file is named."""
    accelerator = make_accelerator(config)
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    monkeypatch.setattr(encoded, "MIN_KEPT_SECONDS", 0.0)
    before = read_examples(config, accelerator)
    with monkeypatch.context() as patch:
        patch.setattr(encoded, "encode_conversations", lambda *_: pytest.fail("it was encoded again"))
        again = read_examples(config, accelerator)
    for row, other in zip(before, again, strict=True):
        assert (row.key, row.part) == (other.key, other.part)
        assert torch.equal(row.input_ids, other.input_ids)
        assert torch.equal(row.loss_mask, other.loss_mask)
    (file,) = cache_folder().glob("encoded/*/examples.safetensors")
    shorter = read_examples(replace(config, max_length=20), accelerator)
    assert max(len(row.input_ids) for row in shorter) == 20
    flip_bit(file, 0.7)
    with complains("its checksum does not match: delete it, and the data are encoded again"):
        read_examples(config, accelerator)
