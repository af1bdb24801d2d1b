"""The target as its own drafter, with sublayers left out by a search."""

import json
import sys

import pytest
from commands import treespec
from models import CONFIGS, TableConfig, TableModel, as_undrafted, save_model, target
from refusals import complains
from test_draft_models import SOME

from treespec import load
from treespec.draft.models.skip import refuse_what_cannot_skip
from treespec.draft.models.skip_set import SkipSet, load_skip_set, save_skip_set
from treespec.model.target import Target


def test_a_saved_set_is_loaded_and_drafts(tmp_path):
    words = save_model(tmp_path / "target")
    file = tmp_path / "skip.json"
    save_skip_set(SOME, file, {"target": str(words)})
    assert load_skip_set(file, 3) == SOME
    assert json.loads(file.read_text())["target"] == str(words)
    spec = load(str(words), None, "2x3", drafter=f"self:{file}", dtype="float32")
    as_undrafted(spec, [[5, 6]], 8)


@pytest.mark.parametrize(
    "content, complaint",
    [
        ('{"layers": Infinity, "attention": [], "mlp": []}', "is no skip set"),
        ('{"layers": 3, "mlp": []}', "is no skip set"),
        ('{"layers": 3, "attention": [1.5], "mlp": []}', "is no skip set"),
        ('{"layers": 3, "attention": [3], "mlp": []}', "names layer 3, the target's are 0 to 2"),
    ],
)
def test_another_file_is_refused(tmp_path, content, complaint):
    (tmp_path / "skip.json").write_text(content)
    with complains(complaint):
        load_skip_set(tmp_path / "skip.json", 3)


def test_models_of_another_build_are_refused_by_name():
    for model in (target("gpt2"), target("opt"), target("gpt-oss"), Target(TableModel(TableConfig(4)))):
        with complains(f"{type(model.model).__name__} cannot draft with layers skipped"):
            refuse_what_cannot_skip(model)
    for name in CONFIGS.keys() & {"llama", "qwen3", "phi3", "gemma3", "granite", "cohere"}:
        refuse_what_cannot_skip(target(name))


def test_the_search_finds_what_is_useless():
    """Of 8 sublayers three cost nothing to skip and gain a tenth each, all others cost more than they gain."""
    from treespec.eval.skip_search import search

    free, tried = SkipSet(4, (1, 3), (2,)), []

    def speed(skipped):
        tried.append(skipped)
        right = len({*skipped.attention} & {*free.attention}) + len({*skipped.mlp} & {*free.mlp})
        return 1 + 0.1 * right - 0.1 * (len(skipped.attention) + len(skipped.mlp) - right)

    best, value, trials = search(speed, layers=4, trials=30)
    assert (best, trials, len(tried)) == (free, 30, 30)
    assert value == pytest.approx(1.3)
    assert tried[0] == SkipSet(4)
    assert search(speed, layers=4, trials=10_000, minutes=0.001)[2] < 100


@pytest.mark.parametrize("name", ["text.txt", "text.jsonl"])
def test_the_command_writes_a_skip_set_that_drafts(tmp_path, monkeypatch, capsys, name):
    words, text, out = save_model(tmp_path / "target"), tmp_path / name, tmp_path / "skip.json"
    turns = [{"role": "user", "content": "the user asks"}, {"role": "assistant", "content": "the answer"}]
    line = json.dumps({"messages": turns}) + "\n"
    text.write_text(line * 3 if name.endswith("jsonl") else "the user asks and the assistant answers " * 9)
    options = f"--text {text} --out {out} --trials 4 --limit 2 --max-new-tokens 6 --dtype float32"
    assert treespec(f"skip --target {words} {options}") == 0
    assert "4/4" in capsys.readouterr().err
    kept = json.loads(out.read_text())
    assert (kept["target"], kept["trials"], kept["layers"]) == (str(words), 4, 3)
    assert load_skip_set(out, 3).layers == 3
    as_undrafted(load(str(words), None, "confident", drafter=f"self:{out}", dtype="float32"), [[5, 6]], 8)


def test_without_the_library_the_extra_is_named(model_folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert treespec(f"skip --target {model_folder} --text {__file__}") == 2
    assert capsys.readouterr().err == "treespec: treespec skip searches with optuna: pip install 'treespec[skip]'\n"
