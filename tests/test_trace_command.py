"""`treespec trace`: generate's answer, cycle by cycle, for people and for tools."""

import json

import pytest
from commands import treespec

from treespec import load

MESSAGE = "Sing of the sea."
OPTIONS = f"--prompt '{MESSAGE}' --tree 2x2 --verifier rrs --temperature 1 --seed 4"


def test_the_texts_of_the_cycles_are_the_answer(home, capsys):
    pair = f"--target {home}/target --head {home}/head --dtype float32"
    assert treespec(f"trace {pair} {OPTIONS} --max-new-tokens 15 --json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    spec = load(f"{home}/target", f"{home}/head", "2x2", "rrs", dtype="float32")
    message = [{"role": "user", "content": MESSAGE}]
    wanted = spec.generate(message, temperature=1, max_new_tokens=15, seed=4)
    assert "".join(line.pop("text") for line in lines) == wanted.text
    pieces = [piece for line in lines for piece in line["answer"]]
    assert sum(len(piece["token_ids"]) for piece in pieces) == wanted.stats.new_tokens
    assert len(lines) == wanted.stats.cycles


def test_a_pipe_gets_plain_trees(home, capsys):
    assert treespec(f"trace --target {home}/target --head {home}/head {OPTIONS} --max-new-tokens 2") == 0
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out
    headings = [line for line in printed.out.splitlines() if line.startswith("cycle ")]
    assert [heading.split(" · ")[0] for heading in headings] == [f"cycle {n + 1}" for n in range(len(headings))]
    assert all(f"{stage} " in headings[0] for stage in ("draft", "head", "target", "verify", "commit"))
    assert printed.out.count("→ ") == printed.out.count("the target's own") == len(headings) > 0
    assert "tokens per target forward" in printed.err


@pytest.mark.parametrize(
    "words, complaint",
    [
        ("--head {}/head --prompt ''", "--prompt is empty"),
        ("", "nothing drafts: give --head or --drafter"),
    ],
)
def test_what_cannot_be_traced_is_one_line(home, words, complaint, capsys):
    assert treespec(f"trace --target {home}/target --prompt a {words.format(home)}") == 2
    assert complaint in capsys.readouterr().err
