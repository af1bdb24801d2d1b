"""What training refuses before it loads a target, and how it says so: in a line that names the file or option."""

import gzip
import resource
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from training import Killed, kill_at, same_weights, small_run, weights, write_data
from transformers import AutoTokenizer

from treespec.cli.train import stopped
from treespec.errors import InputError
from treespec.heads.names import HeadError
from treespec.model.target import Target
from treespec.train.run import train


@pytest.fixture
def config(model_folder, tmp_path):
    return small_run(model_folder, write_data(tmp_path / "data.jsonl"), tmp_path / "head")


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


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"mixed_precision": "int3"}, "--mixed-precision is 'int3', must be no, bf16 or fp16"),
        ({"tracker": "foo"}, "--tracker is 'foo', must be aim, "),
        ({"tracker": "clearml"}, "pip install clearml"),
        ({"data": "nowhere.jsonl"}, "cannot read nowhere.jsonl"),
        ({"template": "vicunia"}, "vicunia"),
        ({"head": "medusa", "bias": False}, "--no-bias is for --head eagle"),
        ({"draft_heads": 3}, "--draft-heads is for --head medusa, hydra, hydra++: leave it out for eagle"),
        ({"head": "meduza"}, "--head is 'meduza', must be one of eagle, eagle3, medusa"),
        ({"head": "medusa", "draft_heads": 0}, "--draft-heads is 0"),
        ({"head": "medusa", "head_layers": 2}, "--head-layers is for --head eagle3: leave it out for medusa"),
        ({"head": "eagle3", "layer_family": "qwen2"}, "--layer-family is 'qwen2', must be llama or qwen3"),
        ({"head": "eagle3", "norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"patience": 3}, "--patience 3 needs --validate-every"),
        ({"first_weights": "fitted", "from_head": "head"}, "leave --first-weights out"),
        ({"feature_dtype": "int8"}, "--feature-dtype is of stored features"),
    ],
)
@pytest.mark.usefixtures("no_target")
def test_options_are_checked_before_the_target_is_loaded(config, changes, complaint):
    assert complaint in refused(config, **changes)
    assert not Path(config.out).exists()


def test_a_target_that_is_not_there_is_one_line(config):
    assert "nowhere" in refused(replace(config, target="nowhere/"))


@pytest.mark.usefixtures("no_target")
def test_a_file_in_the_place_of_a_folder_is_named(config, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "head"):
        assert (
            refused(replace(config, out=str(path))) == f"--out {path}: {tmp_path / 'file'} is a file, not a directory"
        )
        assert refused(replace(config, features=str(path))).startswith(f"--features {path}: ")


@pytest.mark.usefixtures("no_target")
def test_the_folder_of_another_model_is_not_written_into(config):
    assert "holds a model that was not trained there" in refused(replace(config, out=config.target))


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
