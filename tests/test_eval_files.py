"""An evaluation's folder: one writer, models known by content, and a full disk that costs nothing but room."""

import resource
import shutil
from contextlib import contextmanager
from dataclasses import replace

import pytest
from evaluating import answered, config_in, save_models, tokens_of
from models import random_head

from treespec.cli.evaluate import measure
from treespec.errors import InputError
from treespec.eval.mtbench.run import evaluate
from treespec.files.atomic import locked, write_json
from treespec.heads.checkpoint import save_head
from treespec.model.target import Target


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    save_models(folder)
    return folder


class Killed(Exception):
    pass


def begun(config, answers=2):
    """The same evaluation, ended after some answers."""

    def report(step):
        if step.done == answers:
            raise Killed

    with pytest.raises(Killed):
        evaluate(config, report)
    return config


def options(home, out, **changes):
    return config_in(home, out, **{"verifier": "topk", "max_new_tokens": 4, "warm_up": 0} | changes)


def test_a_second_evaluation_with_one_out_is_told_at_once(home, tmp_path):
    with locked(tmp_path / "out"), pytest.raises(InputError, match="out is being written by process"):
        evaluate(options(home, tmp_path / "out"))
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("changed", ["target", "head"])
def test_answers_of_a_model_that_was_trained_again_are_not_mixed(home, tmp_path, changed):
    for name in ("target", "head", "questions.jsonl"):
        (shutil.copytree if (home / name).is_dir() else shutil.copy)(home / name, tmp_path / name)
    config = begun(options(tmp_path, tmp_path / "out"))
    if changed == "head":
        save_head(random_head(Target.load(str(home / "target")), seed=1), tmp_path / "head")
    else:
        file = tmp_path / "target" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\1")
    before = tokens_of(tmp_path / "out")
    with pytest.raises(InputError, match=f"the (target|drafter) .*{changed} has changed since .*out was begun"):
        evaluate(config)
    assert tokens_of(tmp_path / "out") == before


def test_the_same_models_by_other_paths_go_on(home, tmp_path, monkeypatch):
    begun(options(home, tmp_path / "out"))
    for name in ("target", "head"):
        shutil.copytree(home / name, tmp_path / "moved" / name)
    monkeypatch.chdir(tmp_path / "moved")
    again = options(home, tmp_path / "out", target="target", head="head")
    summary = evaluate(again)
    assert summary["questions"] == 3
    assert evaluate(again)["config"]["target"] == "target"
    with pytest.raises(InputError, match=r"another evaluation .*target was"):
        evaluate(options(home, tmp_path / "out", target="other-target"))


def test_a_finished_evaluation_shows_its_tables_without_its_models(home, tmp_path, capsys):
    shutil.copytree(home, tmp_path / "home")
    config = options(tmp_path / "home", tmp_path / "out", limit=1, turns=1)
    measure(config)
    table = capsys.readouterr().out
    for name in ("target", "head"):
        (tmp_path / "home" / name).rename(tmp_path / f"moved-{name}")
    measure(config)
    assert capsys.readouterr().out == table
    with pytest.raises(InputError, match="no target directory"):
        measure(replace(config, out=str(tmp_path / "another")))
    for file in (tmp_path / "out" / "answers").iterdir():
        file.write_text("")
    with pytest.raises(InputError, match="no directory at"):
        measure(config)


def test_a_damaged_answer_amid_others_is_named_and_a_damaged_last_one_given_again(home, tmp_path):
    config = options(home, tmp_path / "out")
    evaluate(config)
    file, whole = tmp_path / "out" / "answers" / "target-topk-t0.jsonl", tokens_of(tmp_path / "out")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], lines[2].replace(b"turns", b"turms")]))
    evaluate(config)
    assert tokens_of(tmp_path / "out") == whole
    assert [answer.question_id for answer in answered(tmp_path / "out")["target-topk-t0"]] == [1, "b", 3]
    file.write_bytes(b"".join([lines[0], lines[1].replace(b"turns", b"turms"), lines[2]]))
    with pytest.raises(InputError, match=r"topk-t0\.jsonl:2 is not an answer line"):
        evaluate(config)


@contextmanager
def disk_of(size):
    """No file may grow beyond so many bytes; the system's error is then that of a full disk by another name."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [1200, 2000, 3000])
def test_a_full_disk_is_one_line_and_the_run_goes_on_later(home, tmp_path, size):
    """The record, an answer or the summary does not fit."""
    config = options(home, tmp_path / "out", limit=2)
    with disk_of(size), pytest.raises(InputError, match=r"^cannot write .*: File too large") as caught:
        evaluate(config)
    assert "\n" not in str(caught.value)
    there = tokens_of(tmp_path / "out")
    evaluate(config)
    assert len(tokens_of(tmp_path / "out")) == 4
    assert tokens_of(tmp_path / "out").items() >= there.items()


def test_an_out_below_a_file_is_told_before_anything_is_loaded(home, tmp_path):
    (tmp_path / "file").write_text("")
    steps = []
    with pytest.raises(InputError, match="cannot write into"):
        evaluate(options(home, tmp_path / "file" / "out"), steps.append)
    assert not steps
    write_json(tmp_path / "out" / "config.json", {"other": 1})
    with pytest.raises(InputError, match="choose another --out"):
        evaluate(options(home, tmp_path / "out"), steps.append)
    assert not steps
