"""Models are known by content, and names that are no directory are told apart from hub ids at once."""

import os
import shutil

import pytest
from models import random_head, target
from refusals import complains

from treespec.files.hub import mistyped
from treespec.heads.checkpoint import load_head, save_head
from treespec.model import identity
from treespec.model.identity import identity_of


def test_an_identity_follows_the_content_and_not_the_path(tmp_path, monkeypatch):
    save_head(random_head(target("llama"), seed=1), tmp_path / "a")
    first = identity_of(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    os.utime(tmp_path / "b" / "model.safetensors", (0, 0))
    (tmp_path / "b" / "training").mkdir()
    (tmp_path / "b" / ".lock").write_text("process 1")
    assert identity_of(tmp_path / "b") == first
    monkeypatch.chdir(tmp_path)
    assert identity_of("a") == first
    save_head(random_head(target("llama"), seed=2), tmp_path / "a")
    assert identity_of(tmp_path / "a") != first
    (tmp_path / "b" / "calibration.json").write_text("{}")
    assert identity_of(tmp_path / "b") != first


@pytest.mark.parametrize("blocks", [256, 4])
def test_first_and_last_bytes_of_a_large_file_count(tmp_path, monkeypatch, blocks):
    monkeypatch.setattr(identity, "BLOCK", 1 << 10)
    monkeypatch.setattr(identity, "BLOCKS", blocks)
    content = bytes(64 << 10)
    file, seen = tmp_path / "model.safetensors", set()
    for place in (None, 0, len(content) - 1):
        changed = bytearray(content)
        if place is not None:
            changed[place] = 1
        file.write_bytes(changed)
        seen.add(identity_of(tmp_path))
    file.write_bytes(content + b"\0")
    assert len({*seen, identity_of(tmp_path)}) == 4


def test_a_mistyped_path_is_told_at_once_with_the_nearest_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "target").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for name in ("runs/trget", "rnus/target", "./runs/targt", "rnus/targt"):
        for load in (load_head, identity_of):
            with complains(rf"directory at {name}; did you mean runs/target\?"):
                load(name)
    for name in ("/nowhere/at/all", "a/b/c", "./x", "file", ""):
        assert mistyped(name)
    for name in ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "gpt2", "org/target"):
        assert mistyped(name) is None
