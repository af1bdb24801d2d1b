"""The search for a skip set."""

import json
import sys

import pytest
from models import save_model

from treespec import load
from treespec.cli import app
from treespec.cli.entry import run
from treespec.draft.models.skip_set import SkipSet, load_skip_set


def test_the_search_finds_what_is_useless():
    """Of 8 sublayers three cost nothing to skip and gain a tenth each, all others cost more than they gain."""
    pytest.importorskip("optuna")
    from treespec.eval.fit.skip_search import search

    free, tried = SkipSet(4, (1, 3), (2,)), []

    def speed(skipped):
        tried.append(skipped)
        right = len({*skipped.attention} & {*free.attention}) + len({*skipped.mlp} & {*free.mlp})
        return 1 + 0.1 * right - 0.1 * (len(skipped.attention) + len(skipped.mlp) - right)

    best, value, trials = search(speed, layers=4, trials=30, seed=1)
    assert (best, trials, len(tried)) == (free, 30, 30)
    assert value == pytest.approx(1.3)
    assert tried[0] == SkipSet(4)
    assert search(speed, layers=4, trials=10_000, minutes=0.001, seed=1)[2] < 100
    assert search(speed, layers=4, trials=3, minutes=0)[2] == 1


def test_answers_that_fill_the_context_are_refused(tmp_path, monkeypatch, capsys):
    pytest.importorskip("optuna")
    words, text = save_model(tmp_path / "target"), tmp_path / "text.txt"
    text.write_text("the user asks")
    assert run(app, ["skip", "--target", str(words), "--text", str(text), "--max-new-tokens", "512"]) == 2
    assert "the target's context holds 512: leave room for a prompt" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["text.txt", "text.jsonl"])
def test_the_command_writes_a_skip_set_that_drafts(tmp_path, monkeypatch, capsys, name):
    pytest.importorskip("optuna")
    words, text, out = save_model(tmp_path / "target"), tmp_path / name, tmp_path / "skip.json"
    turns = [{"role": "user", "content": "the user asks"}, {"role": "assistant", "content": "the answer"}]
    line = json.dumps({"messages": turns}) + "\n"
    text.write_text(line * 3 if name.endswith("jsonl") else "the user asks and the assistant answers " * 9)
    options = ["--text", str(text), "--out", str(out), "--trials", "4", "--limit", "2", "--max-new-tokens", "6"]
    assert run(app, ["skip", "--target", str(words), *options, "--dtype", "float32"]) == 0
    assert "4/4" in capsys.readouterr().err
    kept = json.loads(out.read_text())
    assert (kept["target"], kept["trials"], kept["layers"]) == (str(words), 4, 3)
    assert load_skip_set(out, 3).layers == 3
    spec = load(str(words), None, "confident", drafter=f"self:{out}", dtype="float32")
    wanted = spec.baseline().generate([5, 6], max_new_tokens=8).token_ids
    assert spec.generate([5, 6], max_new_tokens=8).token_ids == wanted


def test_without_the_library_the_extra_is_named(model_folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert run(app, ["skip", "--target", str(model_folder), "--text", __file__]) == 2
    assert capsys.readouterr().err == "treespec: treespec skip searches with optuna: pip install 'treespec[skip]'\n"
