"""Files, names and programs of an earlier treespec (tests/golden) work as they did: no figure and no name has gone."""

import hashlib
import inspect
import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from commands import save_home, wait_until
from golden.figures import FIGURES, RUNS, TRAINING, capture, find_differences, read_rows, to_words
from golden.http_names import list_keys
from golden.names import LISTS, find_lost
from safetensors.torch import load_file

from treespec import load

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))
NAMES = json.loads((GOLDEN / "names.json").read_text(encoding="utf-8"))
SUMS = 2e-3  # of a trained tensor with a random one: AdamW makes rounding larger


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The folder of the process: a copy of the golden files."""
    folder = tmp_path / "golden"
    shutil.copytree(GOLDEN, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.chdir(folder)
    return folder


def read_content(folder):
    """The bytes of a folder's files, but locks, by path."""
    kept = (file for file in sorted(Path(folder).rglob("*")) if file.is_file() and file.name != ".lock")
    return {str(file): file.read_bytes() for file in kept}


def read_json(file):
    return json.loads(Path(file).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_golden_file_gives_the_same_figures(name, files):
    figure = FIGURES[name]
    expected = EXPECTED[name]
    prompt = {"prompt": expected["prompt"]} if "prompt" in inspect.signature(figure).parameters else {}
    found = json.loads(json.dumps(figure(**prompt)))
    differences = [*find_differences(found, expected, SUMS if name.startswith("training") else 1e-5)]
    assert not differences, "; ".join(differences)


def test_every_figure_is_compared():
    assert FIGURES.keys() == EXPECTED.keys()


def test_stored_features_are_read_and_not_stored_again(files):
    """The files of such a training have the keys of a golden one."""
    before = read_content("features")
    capture(f"train {to_words(TRAINING | {'features': 'features', 'out': 'new', 'max_steps': 1, 'calibrate': True})}")
    assert before.items() <= read_content("features").items()  # those of held-out conversations are new
    for name in ("config.json", "calibration.json", "training/config.json", "training/result.json"):
        assert list_keys(read_json(Path("finished", name))) <= list_keys(read_json(Path("new", name)))
    for name in ("training/metrics.jsonl", "training/sample.jsonl"):
        assert list_keys(read_rows(Path("finished", name))) <= list_keys(read_rows(Path("new", name)))


def test_a_finished_training_is_known_and_left_as_it_is(files):
    before = read_content("finished")
    assert "finished holds this head already" in capture(RUNS["finished"])
    assert read_content("finished") == before


def test_an_evaluation_resumes_with_nothing_asked_again(files):
    """The target is named by another path, so that the models are compared with those of the ledger."""
    ledger = read_content("evaluation")["evaluation/ledger.jsonl"]
    report = read_json("evaluation/report.json")
    answers = read_content("evaluation/answers")
    capture(RUNS["evaluation"].replace("--target target", "--target ./target"))
    assert Path("evaluation/ledger.jsonl").read_bytes() == ledger
    for name, content in read_content("evaluation/answers").items():
        assert re.sub(rb'"idxs": .*?\], ', b"", content) == answers[name]  # these began later
    assert not [*find_differences(read_json("evaluation/report.json"), report)]
    for name in ("report.md", "report.html"):
        shown = Path("evaluation", name).read_text(encoding="utf-8")
        for row in report["rows"]:
            assert f"{row['overall']['acceptance_length']['value']:.2f}" in shown


def test_regenerated_answers_are_not_asked_for_again(files):
    before = read_content("regenerated")
    capture(RUNS["regenerated"])
    for name in ("regenerated/conversations.jsonl", "regenerated/left-out.jsonl"):
        assert read_content("regenerated")[name] == before[name]
    differences = find_differences(read_json("regenerated/config.json"), json.loads(before["regenerated/config.json"]))
    assert [*differences] == [".drafter is 'suffix:tokens=0', not None"]  # the default now, which changes no answer


def keep_known_rows(rows, expected):
    """The rows of acceptance's methods and cases that are expected, without gaps to an α* that was not known."""
    known = [(row["at"], row["method"]) for row in expected]
    kept = [row for row in rows if (row["at"], row["method"]) in known]
    for row, before in zip(kept, expected, strict=True):
        if before["gap"] is None:
            row["gap"] = None
    return kept


@pytest.mark.parametrize("place, file", [("tau", "tau.json"), ("acceptance", "acceptance.json")])
def test_measurements_along_kept_texts_give_the_same_rates(place, file, files):
    """There may be more rows, and α* of draws for which it was not known."""
    expected = read_json(Path(place, file))
    before = read_content(place)
    capture(RUNS[place])
    found = read_json(Path(place, file))
    if "sweeps" in expected:
        pairs = zip(found["sweeps"], expected["sweeps"], strict=True)
        found["sweeps"] = [keep_known_rows(rows, known) for rows, known in pairs]
    assert not [*find_differences(found, expected, 1e-4)]
    for name in (name for name in before if "texts" in name):
        assert read_content(place)[name] == before[name]


def test_a_trace_has_the_same_cycles(files):
    expected = read_rows("trace.jsonl")
    assert not [*find_differences([*map(json.loads, capture(RUNS["trace.jsonl"]).splitlines())], expected)]


def test_a_certificate_has_the_same_keys_and_verdict(files):
    expected = read_json("certificate.json")
    capture(RUNS["certificate.json"])
    found = read_json("certificate.json")
    assert list_keys(expected) <= list_keys(found)
    assert [test["passed"] for test in found["tests"]] == [test["passed"] for test in expected["tests"]]


def test_a_kept_memory_grows_behind_what_it_held(files):
    before = load_file("memory/shared.safetensors")["tokens"]
    answer = load("target", drafter="suffix:memory", dtype="float32").generate([5, 6], max_new_tokens=4)
    wait_until(lambda: len(load_file("memory/shared.safetensors")["tokens"]) > len(before))
    after = load_file("memory/shared.safetensors")["tokens"].tolist()
    assert after[: len(before)] == before.tolist()
    assert after[-1 - len(answer.token_ids) : -1] == answer.token_ids


def test_no_golden_file_was_written_again():
    """Nor moved, nor edited by a tool that renames: `python -m golden.make` adds files alone."""
    for name, digest in read_json(GOLDEN / "digests.json").items():
        assert hashlib.sha256((GOLDEN / name).read_bytes()).hexdigest() == digest, name


def test_every_golden_place_is_read():
    """As a place without a reader holds nothing."""
    places = [path.name for path in GOLDEN.iterdir() if path.is_dir() or path.suffix in (".json", ".jsonl")]
    readers = Path(__file__).read_text(encoding="utf-8") + (GOLDEN / "figures.py").read_text(encoding="utf-8")
    assert [place for place in places if place not in readers and place != "__pycache__"] == []


NEW_DEFAULTS = (  # validations come at shares of a run, and stored features need no whole target
    "train --decode-on 8 (now None)",
    "train --validate-every 1000 (now None)",
)


@pytest.mark.parametrize("name", NAMES)
def test_no_name_has_gone(name, files):
    gone = [lost for lost in find_lost(NAMES[name], LISTS[name](NAMES[name])) if lost not in NEW_DEFAULTS]
    assert not gone, f"{name} that have gone: {', '.join(gone)}"


def test_every_list_of_names_is_compared():
    assert LISTS.keys() == NAMES.keys()


PROGRAMS = sorted((GOLDEN / "programs").glob("*.py"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A tiny target and head, whose words are bytes; the target is also what `demo` names there."""
    folder = tmp_path_factory.mktemp("pair")
    save_home(folder)
    (folder / "demo").symlink_to(folder / "target")
    return folder


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda file: file.stem)
def test_a_program_that_was_written_before_runs(program, pair, monkeypatch, capsys):
    monkeypatch.chdir(pair)
    monkeypatch.setattr(sys, "argv", [str(program), "target", "head"])
    runpy.run_path(str(program), run_name="__main__")
    assert capsys.readouterr().out
