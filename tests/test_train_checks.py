"""What training refuses of its files and options, in a line that names the file or option."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from training import beside, files_of_at_most, folder_of, killed, refused, same_head, trained, write_data
from transformers import AutoTokenizer

from treespec.model.target import Target
from treespec.train.checkpoints import latest_step
from treespec.train.run import train


@pytest.fixture
def no_target(monkeypatch):
    """A target cannot be loaded: what is refused all the same is refused early."""

    def load(*_, **__):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(Target, "load", load)


@pytest.mark.parametrize(
    "name, content, complaint",
    [
        ("data.jsonl.gz", b"\x1f\x8b\x08\x00", "cannot read .*data.jsonl.gz: .* fetch it again"),
        ("notes.txt", b"Some notes.\nOf two lines.\n", "notes.txt:1: not valid JSON.*one conversation a line"),
        ("deep.jsonl", b'{"messages": ' + b"[" * 100_000, "deep.jsonl:1: not valid JSON"),
    ],
)
@pytest.mark.usefixtures("no_target")
def test_what_is_no_jsonl_is_named_for_what_it_is(config, tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    assert re.search(complaint, refused(config, data=f"{tmp_path}/{name}"))


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
    config = trained(config, target=str(folder), max_steps=1)  # the token does not occur
    data = write_data(tmp_path / "more.jsonl", name="zyx")
    assert "the target has" in refused(beside(config, "other"), data=str(data))


def test_a_full_disk_is_one_line_and_the_checkpoint_before_still_good(config, tmp_path):
    killed(config, 1)
    assert latest_step(folder_of(config)) is None
    killed(config, 3)
    third = beside(config, "3")
    folder_of(third).mkdir(parents=True)
    (folder_of(third) / "metrics.jsonl").write_text('{"step": 0}\n' * 1000)
    with files_of_at_most(4096):
        assert "model.safetensors: " in refused(config)
        features = f"{tmp_path}/features"
        assert "features-00000.safetensors: " in refused(beside(config, "2", features=features))
        assert "metrics.jsonl: " in refused(third)
    assert not list(tmp_path.rglob("*.tmp"))
    assert latest_step(folder_of(config)) == 2
    assert same_head(trained(config), trained(beside(config, "whole")))


def test_a_disk_that_is_full_at_the_end_leaves_no_half_head(config):
    with files_of_at_most(4096):
        refused(replace(config, checkpoint_every=100))
    assert not list(Path(config.out).glob("*.safetensors"))
    train(config)
