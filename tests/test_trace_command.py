"""`treespec trace`: generate's answer, cycle by cycle, for people and for tools."""

import json

import pytest

from treespec import load
from treespec.cli import app, run
from treespec.requests.events import Cycle

MESSAGE = "Sing of the sea."
OPTIONS = ["--prompt", MESSAGE, "--tree", "2x2", "--verifier", "rrs", "--temperature", "1", "--seed", "4"]


@pytest.fixture(scope="module")
def pair(home):
    return ["--target", str(home / "target"), "--head", str(home / "head"), "--dtype", "float32"]


def test_the_texts_of_the_cycles_are_the_answer(pair, capsys):
    assert run(app, ["trace", *pair, *OPTIONS, "--max-new-tokens", "15", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    spec = load(pair[1], pair[3], "2x2", "rrs", dtype="float32")
    message = [{"role": "user", "content": MESSAGE}]
    wanted = spec.generate(message, temperature=1, max_new_tokens=15, seed=4)
    assert "".join(line.pop("text") for line in lines) == wanted.text
    cycles = [Cycle.from_json(line) for line in lines]
    assert sum(cycle.new_tokens for cycle in cycles) == wanted.stats.new_tokens
    assert len(cycles) == wanted.stats.cycles


def test_a_pipe_gets_plain_trees(pair, capsys):
    assert run(app, ["trace", *pair, *OPTIONS, "--cycles", "2"]) == 0
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out
    headings = [line for line in printed.out.splitlines() if line.startswith("cycle ")]
    assert [heading.split(" · ")[0] for heading in headings] == ["cycle 1", "cycle 2"]
    assert all(f"{stage} " in headings[0] for stage in ("draft", "head", "target", "verify", "commit"))
    assert printed.out.count("→ ") == printed.out.count("the target's own") == 2
    assert "tokens per target forward" in printed.err


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["--head", "HEAD", "--cycles", "0"], "--cycles is 0"),
        (["--head", "HEAD", "--prompt", ""], "--prompt is empty"),
        ([], "nothing drafts: give --head or --drafter"),
    ],
)
def test_what_cannot_be_traced_is_one_line(pair, words, complaint, capsys):
    given = [pair[3] if word == "HEAD" else word for word in words]
    assert run(app, ["trace", *pair[:2], "--prompt", "a", *given]) == 2
    assert complaint in capsys.readouterr().err
