"""Every block of Python on a page runs, with a tiny target and head behind the names that it gives."""

import re
import sys
from pathlib import Path

import pytest
from commands import save_home, serving, tiny_spec

ROOT = Path(__file__).parent.parent
EXAMPLES = {file.read_text(encoding="utf-8"): file for file in (ROOT / "docs" / "examples").glob("*.py")}
BLOCK = re.compile(r"^```(?:python|py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LOADED = re.compile(r'\bload\(\s*"([^"]+)"(?:,\s*(?:head=)?"([^"]+)")?')  # a target, and a head
SERVER = "http://127.0.0.1:8000"
CHECKED = re.compile(r"\bcheck\((.*)\)\)$", re.MULTILINE)  # of many cycles: fewer of them do here
SKETCHES = {"while not done:": "the loop of decoding, whose parts stand for any"}  # by first line: why it does not run


def programs():
    """(page, the page's blocks up to this one) for each block that neither is an example nor a sketch."""
    for page in (ROOT / "README.md", ROOT / ".github/CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8") if page.exists() else ""
        blocks = [block for block in BLOCK.findall(text) if block.splitlines()[0] not in SKETCHES]
        for number, block in enumerate(blocks):
            if block not in EXAMPLES:
                yield pytest.param(blocks[: number + 1], id=f"{page.name} block {number + 1}")


def name_models(block, folder):
    """Let the targets and heads that a block loads be the tiny ones."""
    for target, head in LOADED.findall(block):
        for name, tiny in ((target, "target"), (head, "head")):
            place = folder / name
            if name and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(folder / tiny)


@pytest.fixture(scope="module")
def server():
    """What a page's clients ask, by the name of the target `demo`."""
    with serving(tiny_spec(), name="demo") as state:
        yield state.url


@pytest.mark.parametrize("blocks", programs())
def test_a_block_of_a_page_runs_behind_those_before_it(blocks, server, tmp_path, monkeypatch, capsys):
    save_home(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    monkeypatch.setattr(sys, "argv", ["block.py", "target", "head"])
    names = {"__name__": "__main__"}
    for block in blocks:
        name_models(block, tmp_path)
        text = CHECKED.sub(r"check(\1, runs=100))", block.replace(SERVER, server))
        exec(compile(text, "block.py", "exec"), names)
