"""The quickstart: three jobs on one target, each stage kept once it is finished, and harmless to interrupt."""

import json
import sys

import pytest
from evaluating import save_models

from treespec.cli import main, side_by_side
from treespec.cli.quickstart import CONVERSATIONS, FRESH
from treespec.cli.side_by_side import Side, race, table_of
from treespec.decode import Piece
from treespec.text.conversations import read_conversations
from treespec.train import run as training

COMMAND = sys.modules["treespec.cli.quickstart"]  # in the package, the command has the module's name
STAGES = (
    (side_by_side, "race"),
    (training, "fit"),
    (COMMAND, "measure_verifiers"),  # test_eval_files.py interrupts an evaluation itself
)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the quickstart on a tiny target. Returns its exit code and what it printed."""
    save_models(tmp_path)
    options = ["--head-minutes", "0.005", "--max-new-tokens", "3", "--limit", "1"]
    line = ["treespec", "quickstart", "--target", str(tmp_path / "target"), "--out", str(tmp_path / "an out"), *options]
    monkeypatch.setattr(sys, "argv", line)
    lines = CONVERSATIONS.read_text().splitlines()[:12]
    (tmp_path / "conversations.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(COMMAND, "CONVERSATIONS", tmp_path / "conversations.jsonl")
    monkeypatch.setattr(COMMAND, "VERIFIERS", "rrs-wo@2x2")
    monkeypatch.setattr("treespec.cli.side_by_side.TOKENS", 6)

    def run():
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().out

    return run


def test_an_interrupt_in_any_stage_keeps_those_before_and_a_finished_one_is_not_repeated(run, tmp_path, monkeypatch):
    # 1. An interrupt in each stage but the first, which has tests of its own.
    said = ""
    for number, (module, stage) in enumerate(STAGES):
        with monkeypatch.context() as interrupted:
            interrupted.setattr(module, stage, stop)
            code, said = run()
        assert code == 130
        assert ("answered before" in said) == (number > 1)
        assert ("holds this head already" in said) == (number > 2)
        assert f"{number + 2}/4" in said

    # 2. The same command goes on, and shows all of it.
    code, said = run()
    assert code == 0
    assert "3 of 3 texts are the same" in said
    assert "times as fast" in said
    assert "top-1 agreement by draft step" in said
    assert "rrs-wo" in said
    assert f"treespec chat --target {tmp_path}/target --head '{tmp_path}/an out/{FRESH}'\n" in said

    # 3. Once more: nothing is done again.
    held = {file: file.stat().st_mtime_ns for file in (tmp_path / "an out").rglob("*.safetensors")}
    code, again = run()
    assert code == 0
    assert "answered before" in again
    assert "holds this head already" in again
    assert again.splitlines()[-12:] == said.splitlines()[-12:]
    assert held == {file: file.stat().st_mtime_ns for file in held}


def stop(*_, **__):
    raise KeyboardInterrupt


def test_answers_of_other_models_are_made_again(run, tmp_path, monkeypatch):
    monkeypatch.setattr(COMMAND, "train_head", stop)
    run()
    file = tmp_path / "an out" / "answers.json"
    rows = json.loads(file.read_text())["rows"]
    assert [len(row["sides"]) for row in rows] == [2, 2, 2]
    assert "answered before" in run()[1]
    config = tmp_path / "target" / "generation_config.json"
    config.write_text(config.read_text() + " ")
    assert "answered before" not in run()[1]
    file.write_text("{")
    assert "answered before" not in run()[1]


def test_each_side_of_a_race_shows_what_it_would_show_alone():
    sides, seen, now = [Side([]), Side([])], [], 0

    def pieces(seconds):
        nonlocal now
        for number in range(4):
            now += seconds
            yield Piece(f"{number} ", [number], drafted=number > 1)

    race([pieces(5), pieces(1)], sides, lambda: seen.append(tuple(side.tokens for side in sides)), lambda: now)
    assert seen == [(1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert [side.text for side in sides] == ["0 1 2 3", "0 1 2 3"]
    assert [side.seconds for side in sides] == [20, 4]
    assert table_of(sides).row_count == 3


def test_the_conversations_that_ship_are_sound():
    conversations, report = read_conversations(CONVERSATIONS)
    assert 150 <= len(conversations) <= 250
    assert not report.left_out
    assert CONVERSATIONS.stat().st_size < 300_000
    for line in CONVERSATIONS.read_text().splitlines():
        assert set(json.loads(line)) == {"id", "messages"}
