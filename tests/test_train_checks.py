"""What training refuses of its files and options, in a line that names the file or option."""

import gzip
import resource
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from training import Killed, kill_at, same_weights, weights, write_data
from transformers import AutoTokenizer

from treespec.cli.train import stopped
from treespec.errors import InputError
from treespec.heads.names import HeadError
from treespec.model.target import Target
from treespec.train.run import train


@pytest.fixture
def no_target(monkeypatch):
    """A target cannot be loaded: what is refused all the same is refused early."""

    def load(*_, **__):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(Target, "load", load)


def refused(config, **changes):
    with pytest.raises((InputError, HeadError)) as told:
        train(replace(config, **changes))
    assert "\n" not in str(told.value)
    return str(told.value)


@pytest.mark.usefixtures("no_target")
def test_what_is_no_jsonl_is_named_for_what_it_is(config, tmp_path):
    packed = gzip.compress(Path(config.data).read_bytes())
    (tmp_path / "data.jsonl.gz").write_bytes(packed[:-20])
    said = refused(replace(config, data=str(tmp_path / "data.jsonl.gz")))
    assert "data.jsonl.gz is a damaged gzip archive" in said
    (tmp_path / "data.zip").write_bytes(b"PK\x03\x04")
    assert "data.zip is a zip archive: unpack it" in refused(replace(config, data=str(tmp_path / "data.zip")))
    (tmp_path / "notes.txt").write_text("Some notes.\nOf two lines.\n")
    said = refused(replace(config, data=str(tmp_path / "notes.txt")))
    assert "notes.txt:1: not valid JSON" in said
    assert "one conversation a line" in said
    (tmp_path / "deep.jsonl").write_text('{"messages": ' + "[" * 100_000)
    assert "deep.jsonl:1: not valid JSON" in refused(replace(config, data=str(tmp_path / "deep.jsonl")))


def test_without_held_out_conversations_no_numbers_are_made_up(config, tmp_path, capsys):
    same = tmp_path / "same.jsonl"
    same.write_text("\n".join(Path(config.data).read_text().splitlines()[:1] * 4))
    result = train(replace(config, data=str(same), max_steps=1, calibrate=True))
    said = capsys.readouterr().out
    assert "none is held out, so the head is neither validated nor calibrated" in said
    assert "the head was not validated" in said
    assert "0.0%" not in said
    assert "not validated" in str(result)


def test_a_token_that_the_target_lacks_is_one_line(config, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["zyx"])
    tokenizer.save_pretrained(folder)
    train(replace(config, target=str(folder), max_steps=1))  # the token does not occur
    data = write_data(tmp_path / "more.jsonl", name="zyx")
    assert "the target has" in refused(replace(config, target=str(folder), data=str(data), out=str(tmp_path / "other")))


def test_an_interrupt_says_which_step_the_same_command_goes_on_from(config):
    for step, said in ((1, "first checkpoint would have been at step 2"), (3, "goes on from step 2")):
        with pytest.raises(Killed):
            train(config, kill_at(step))
        assert said in stopped(config)


def test_an_earlier_refusal_blocks_no_other_run(config):
    """A run that failed wrote nothing that the next one must agree with."""
    refused(replace(config, data="nowhere.jsonl", learning_rate=1e-2))
    with pytest.raises(Killed):
        train(replace(config, learning_rate=1e-2), kill_at(1))  # before its first checkpoint
    train(config)
    assert "learning_rate = 0.001, not 0.1" in refused(replace(config, learning_rate=0.1))


@contextmanager
def files_of_at_most(size):
    """Writing beyond the limit fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_line_and_the_checkpoint_before_still_good(config, tmp_path):
    with pytest.raises(Killed):
        train(config, kill_at(3))
    metrics = Path(config.out + "3") / "training" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"step": 0}\n' * 1000)
    with files_of_at_most(4096):
        assert "model.safetensors: " in refused(config)
        features = tmp_path / "features"
        assert "features-00000.safetensors: " in refused(replace(config, out=config.out + "2", features=str(features)))
        assert "metrics.jsonl: " in refused(replace(config, out=config.out + "3"))
    assert not list(tmp_path.rglob("*.tmp"))
    assert "goes on from step 2" in stopped(config)
    train(config)
    whole = replace(config, out=str(tmp_path / "whole"))
    train(whole)
    assert same_weights(weights(config), weights(whole))


def test_a_disk_that_is_full_at_the_end_leaves_no_half_head(config):
    with files_of_at_most(4096):
        refused(replace(config, checkpoint_every=100))
    assert not list(Path(config.out).glob("*.safetensors"))
    train(config)
