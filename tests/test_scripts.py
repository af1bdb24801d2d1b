"""Every script of docs/scripts runs, on models so small that a figure says nothing."""

import json
import re
import runpy
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from evaluating import save_models
from http_serving import serving, tiny_spec

SCRIPTS = Path(__file__).parent.parent / "docs" / "scripts"
RUNS = [  # a script, its arguments, and what it prints of its figures
    ("measure", "forwards target --nodes 1,5 --rounds 1", r"\| float32 \| packed \| \d+ \| [\d.]+ \| [\d.]+ \|"),
    ("measure", "long-context target head 32", r"\| 32 \| \+\d+ MiB \|"),
    ("measure", "costs target head 8", r"\| 8 \| [\d.]+ \|"),
    ("measure", "paired one.jsonl other.jsonl", r"\+100% \(\+100% to \+100%\)"),
    ("measure", "verify --vocabulary 64 --rounds 1", r"\| `layer:greedy` \| [\d.]+ \|"),
    ("picture", "target head Hello --max-new-tokens 4 --out chat.svg", "wrote chat.svg"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What scripts read: a pair, questions, and answers to them."""
    folder = tmp_path_factory.mktemp("scripts")
    save_models(folder)
    for name, cycles in (("one", 5), ("other", 10)):
        counts = {"new_tokens": [20], "decoding_steps": [cycles]}
        lines = [json.dumps({"question_id": number, "choices": [counts]}) for number in range(3)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def run(script, arguments, monkeypatch):
    """As `python SCRIPT ARGUMENTS` does."""
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with suppress(SystemExit):
        runpy.run_path(f"{SCRIPTS}/{script}.py", run_name="__main__")


@pytest.mark.parametrize("script, arguments, shown", RUNS)
def test_the_script_runs(script, arguments, shown, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    with torch.no_grad():
        run(script, arguments.split(), monkeypatch)
    assert re.search(shown, capsys.readouterr().out)


def test_every_request_under_load_is_answered(tmp_path, monkeypatch, capsys):
    """A row for each number of clients, with all of its requests."""
    data = tmp_path / "asked.jsonl"
    asked = [{"conversations": [{"from": "human", "value": f"the user asks {n}"}]} for n in range(3)]
    data.write_text("\n".join(json.dumps(line) for line in asked))
    with serving(tiny_spec()) as server:
        few = ["--clients", "1,3", "--requests", "3", "--rate", "50", "--max-new-tokens", "5", "--data"]
        run("load", [server.url, *few, str(data)], monkeypatch)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| http")]
    found = [re.match(r"\| \S+ \| (\d+) \| (\d+) \| [\d.]+ \| [\d.]+ s \|", row).groups() for row in rows]
    assert found == [("1", "8"), ("3", "9")]
