"""The ledger: one writer, models known by content, and nothing lost by a kill or a full disk."""

import json
import os
import shutil
import signal
import subprocess
from dataclasses import replace

import pytest
from commands import complains, config_in, to_command, tokens_of, write_counting
from models import random_head
from training import Killed, files_of_at_most

from treespec.cli.measure import evaluate as command
from treespec.eval.benchmark import evaluate
from treespec.eval.figures import summarize_ledger
from treespec.eval.ledger import LEDGER_FORMAT, Ledger
from treespec.files.atomic import add_checksum, locked, write_json
from treespec.heads.checkpoint import save_head
from treespec.model.target import Target


def begun(config, completions=2):
    """The same evaluation, ended after some completions."""

    def report(step):
        if step.done == completions:
            raise Killed

    with pytest.raises(Killed):
        evaluate(config, report)
    return config


def options(home, out, **changes):
    return config_in(home, out, **{"verifier": "topk", "max_new_tokens": 4, "warm_up": 0} | changes)


def test_a_killed_evaluation_resumes_and_a_finished_one_stays_unchanged(home, tmp_path):
    whole = evaluate(options(home, tmp_path / "whole"))
    config = options(home, tmp_path / "out")
    file = tmp_path / "out" / "ledger.jsonl"
    before = b""
    for completions in (1, 4):
        begun(config, completions)
        assert file.read_bytes().startswith(before)
        before = file.read_bytes()
    evaluate(config)
    assert tokens_of(tmp_path / "out") == tokens_of(tmp_path / "whole")
    assert [len(Ledger(tmp_path / "out").list_entries(kind)) for kind in ("head", "completion")] == [1, 6]
    before = file.read_bytes()
    again = evaluate(config)
    assert file.read_bytes() == before
    assert [row["name"] for row in again["rows"]] == [row["name"] for row in whole["rows"]]


def test_another_evaluation_is_refused_in_a_line_that_names_what_differs(home, tmp_path, monkeypatch):
    config = begun(options(home, tmp_path / "out", questions=write_counting(tmp_path / "q.jsonl", 3)))
    questions = write_counting(tmp_path / "questions.jsonl", 3)
    monkeypatch.setattr("treespec.eval.benchmark.describe", lambda target: {"device": "abacus"})
    with complains(r"device was .*, now abacus"):
        evaluate(config)
    monkeypatch.undo()
    for change, words in (
        ({"max_new_tokens": 5}, r"another evaluation \(max_new_tokens was 4, now 5\): choose another --out"),
        ({"verifier": "rrs", "seed": 1}, "verifier was topk, now rrs; seed was 0, now 1"),
        ({"questions": questions}, "questions was .*, now .*"),
        ({"limit": 1}, "limit was None, now 1"),
        ({}, "the questions changed"),
    ):
        if not change:
            write_counting(tmp_path / "q.jsonl", 4)
        with complains(words):
            evaluate(replace(config, **change))


def test_another_format_is_refused(tmp_path):
    file = tmp_path / "ledger.jsonl"
    file.write_text(json.dumps(add_checksum({"kind": "head", "format": 9})) + "\n")
    with complains(rf"ledger.jsonl has format 9, this treespec reads {LEDGER_FORMAT}: choose another --out"):
        Ledger(tmp_path)


@pytest.mark.parametrize("changed", ["target", "head"])
def test_completions_of_a_model_that_was_trained_again_are_not_mixed(home, tmp_path, changed):
    for name in ("target", "head", "questions.jsonl"):
        (shutil.copytree if (home / name).is_dir() else shutil.copy)(home / name, tmp_path / name)
    config = begun(options(tmp_path, tmp_path / "out"))
    if changed == "head":
        save_head(random_head(Target.load(f"{home}/target"), seed=1), tmp_path / "head")
    else:
        file = tmp_path / "target" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\1")
    before = tokens_of(tmp_path / "out")
    files = {"target": "the target's files", "head": "the files of drafter 1"}[changed]
    with complains(rf"out holds another evaluation \({files} changed\)"):
        evaluate(config)
    assert tokens_of(tmp_path / "out") == before


def test_the_same_models_by_other_paths_go_on(home, tmp_path, monkeypatch):
    begun(options(home, tmp_path / "out"))
    for name in ("target", "head"):
        shutil.copytree(home / name, tmp_path / "moved" / name)
    monkeypatch.chdir(tmp_path / "moved")
    again = options(home, tmp_path / "out", target="target", head="head")
    assert evaluate(again)["questions"] == 3
    assert evaluate(again)["options"]["target"] == "target"
    with complains(r"another evaluation .*target was"):
        evaluate(options(home, tmp_path / "out", target="other-target"))


def test_a_finished_evaluation_shows_its_tables_without_its_models(home, tmp_path, capsys):
    shutil.copytree(home, tmp_path / "home")
    config = options(tmp_path / "home", tmp_path / "out", limit=1, turns=1)
    command.__wrapped__(config)
    table = capsys.readouterr().out
    for name in ("target", "head"):
        (tmp_path / "home" / name).rename(tmp_path / f"moved-{name}")
    command.__wrapped__(config)
    assert capsys.readouterr().out == table
    with complains("no target directory"):
        command.__wrapped__(replace(config, out=f"{tmp_path}/another"))
    file = tmp_path / "out" / "ledger.jsonl"
    file.write_bytes(file.read_bytes().splitlines(keepends=True)[0])
    with complains("no directory at"):
        command.__wrapped__(config)
    with complains("no question is completed"):
        summarize_ledger(Ledger(tmp_path / "out"))


@pytest.mark.parametrize("size", [1000, 4500, 7000])
def test_a_full_disk_is_one_line_and_the_run_goes_on_later(home, tmp_path, size):
    """The head, a completion or what comes after does not fit."""
    config = options(home, tmp_path / "out", limit=2)
    with files_of_at_most(size), complains(r"^cannot write .*: File too large"):
        evaluate(config)
    there = tokens_of(tmp_path / "out")
    evaluate(config)
    assert len(tokens_of(tmp_path / "out")) == 4
    assert tokens_of(tmp_path / "out").items() >= there.items()


def test_a_folder_that_is_locked_or_read_only_is_reported_before_loading(home, tmp_path):
    steps = []
    with locked(tmp_path / "out"), complains("out is being written by process"):
        evaluate(options(home, tmp_path / "out"), steps.append)
    (tmp_path / "file").write_text("")
    with complains("cannot write into"):
        evaluate(options(home, tmp_path / "file" / "out"), steps.append)
    write_json(tmp_path / "out" / "ledger.jsonl", {"other": 1})
    before = (tmp_path / "out" / "ledger.jsonl").read_bytes()
    with complains("choose another --out"):
        evaluate(options(home, tmp_path / "out"), steps.append)
    assert (tmp_path / "out" / "ledger.jsonl").read_bytes() == before
    assert not steps


HEAD = {"format": LEDGER_FORMAT, "options": {}}


def kept(folder, numbers=()):
    """The numbers of the entries after the head; `numbers` are appended before."""
    ledger = Ledger(folder)
    for number in numbers:
        ledger.append("head" if number is None else "checked", HEAD if number is None else {"number": number})
    return [entry["number"] for entry in Ledger(folder).list_entries("checked")]


def test_a_line_cut_anywhere_is_dropped_and_replaced(tmp_path):
    assert kept(tmp_path) == []
    assert kept(tmp_path, [None, "Zürich 🎵\u2028", 2]) == ["Zürich 🎵\u2028", 2]
    whole = (tmp_path / "ledger.jsonl").read_bytes()
    for cut in range(whole[:-1].rindex(b"\n") + 1, len(whole)):
        (tmp_path / "ledger.jsonl").write_bytes(whole[:cut])
        assert kept(tmp_path) == ["Zürich 🎵\u2028"]
        assert kept(tmp_path, [3]) == ["Zürich 🎵\u2028", 3]
    for cut in range(1, whole.index(b"\n")):  # the head itself
        (tmp_path / "ledger.jsonl").write_bytes(whole[:cut])
        assert kept(tmp_path, [None, 4]) == [4]


NO_ENTRIES = (b"{", b"[]", b"7", b'{"kind": "checked"}', b"\xff", b"[" * 9999, b'{"kind": [[]]}', b"")


def test_only_a_damaged_last_line_is_dropped_others_are_errors_with_numbers(tmp_path):
    kept(tmp_path, [None, 1, 2])
    file = tmp_path / "ledger.jsonl"
    head, first, second, _ = file.read_bytes().split(b"\n")
    for bad in (*NO_ENTRIES, second.replace(b'"number": 2', b'"number": 12')):
        file.write_bytes(b"\n".join([head, first, bad, second, b""]))
        with complains(r"ledger\.jsonl:3 is damaged"):
            kept(tmp_path)
        file.write_bytes(b"\n".join([head, first, bad, b""]))
        assert kept(tmp_path) == [1]
        assert kept(tmp_path, [2]) == [1, 2]


def append_for_ever() -> None:
    """To the ledger in the folder that the command line names, until the process is killed."""
    import itertools
    import sys
    from pathlib import Path

    from treespec.eval.ledger import Ledger

    ledger = Ledger(Path(sys.argv[1]))
    ledger.append("head", {"format": 3})
    for i in itertools.count():
        ledger.append("checked", {"number": i, "words": "x" * 50_000})
        print(i, flush=True)


def test_a_kill_loses_no_entry_whose_append_returned(tmp_path):
    process = subprocess.Popen([*to_command(append_for_ever), str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(20):
        process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    acknowledged = 20 + len(process.stdout.read().splitlines())
    process.wait()
    assert len(kept(tmp_path)) >= acknowledged
    assert kept(tmp_path) == list(range(len(kept(tmp_path))))
