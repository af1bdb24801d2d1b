"""The table of published heads, `treespec heads`, and `--head auto`."""

import json
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
from commands import complains, treespec

from treespec.api.load import parse_drafter
from treespec.cli.answer import GenerateConfig
from treespec.demo.known import find_head_for
from treespec.eval.config import CalibrateConfig
from treespec.heads.published import choose_published_head, list_heads_for, read_published_heads
from treespec.heads.registry import HEAD_KINDS

ROWS = read_published_heads()
TARGET = "meta-llama/Llama-3.1-8B-Instruct"
FORMATS = Path(__file__).parent.parent / "docs" / "formats.md"


def test_every_published_head_is_of_a_kind_that_loads():
    loaded = set(re.findall(r"^\|[^|]*\|[^|]*\| `([\w+-]+)` \|", FORMATS.read_text(), re.MULTILINE))
    for row in ROWS:
        assert row.kind in HEAD_KINDS
        assert row.kind in loaded, row
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", row.head)
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", row.target)
        assert date(2023, 1, 1) < date.fromisoformat(row.date)
        assert row.project
    assert len({row.head for row in ROWS}) == len(ROWS)


def test_the_first_head_of_a_target_is_the_newest_eagle3():
    for target in {row.target for row in ROWS}:
        heads = [row for row in list_heads_for(target) if row.kind == "eagle3" and not row.head.endswith("-zh")]
        if heads:
            assert choose_published_head(target) == max(heads, key=lambda row: row.date)


def test_heads_of_a_target_are_listed_without_torch():
    code = "import sys; from treespec.cli import app, run; sys.exit(run(app, sys.argv[1:]) or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "heads", TARGET], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    title, *lines = done.stdout.splitlines()
    assert title == TARGET
    assert [line.split()[0] for line in lines] == [row.head for row in list_heads_for(TARGET)]
    assert done.stderr.startswith(f"Next: treespec eval --target {TARGET} --head auto")


def test_heads_takes_a_part_of_a_name_and_suggests_others(capsys):
    assert treespec("heads") == 0
    assert len(capsys.readouterr().out.splitlines()) == len(ROWS) + len({row.target for row in ROWS})
    assert treespec("heads llama-3.1") == 0
    assert capsys.readouterr().out.startswith(TARGET)
    assert treespec("heads meta-llama/Llama-3.1-8B-Instrukt") == 2
    assert f"(did you mean {TARGET}?)" in capsys.readouterr().err
    assert treespec("heads demo") == 0
    assert "own head" in capsys.readouterr().out


def test_head_auto_takes_the_published_head_and_says_so(caplog, tmp_path):
    head = choose_published_head(TARGET).head
    (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": TARGET}))
    for target in (TARGET, TARGET.lower(), str(tmp_path)):
        caplog.clear()
        assert GenerateConfig(target=target, head="auto").head == head
        assert f"--head auto takes {head} (eagle3" in caplog.text
    assert CalibrateConfig(target=TARGET, head="auto").head == head
    assert parse_drafter(TARGET, "auto", None).place == head
    assert parse_drafter("demo", "auto", None).place == find_head_for("demo")


@pytest.mark.parametrize("target", ["Qwen/Qwen9", "FOLDER"])
def test_head_auto_without_a_published_head_is_an_error(target, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with complains("no published head is known for .*: treespec heads lists .* without --head the text itself drafts"):
        GenerateConfig(target=target.replace("FOLDER", str(tmp_path)), head="auto")


def test_without_a_head_the_text_drafts_unless_none_is_named():
    assert GenerateConfig(target="a/target").source == "suffix:tokens=0"
    assert GenerateConfig(target="a/target", drafter="none").source is None
    assert GenerateConfig(drafter="none").source is None  # of demo
    assert parse_drafter("a/target", None, None).written == "suffix:tokens=0"
    assert parse_drafter("demo", None, "none") is None
