"""The quickstart: greedy completions with and without drafts, verifiers, all of it on one screen."""

import pytest
from commands import treespec
from rich.console import Console

from treespec import load
from treespec.cli.side_by_side import Side, compare, race, table_of
from treespec.decoding.sequence import Piece


def test_it_fits_one_screen_on_a_pipe(home, capsys):
    target = f"{home}/target"
    assert treespec(f"quickstart --target {target} --max-new-tokens 6") == 0
    said = capsys.readouterr().out
    assert "times as fast; 3 of 3 texts are the same" in said
    assert "rounding" not in said
    assert [line[5:27].rstrip() for line in said.splitlines()[-5:-2]] == ["one token at a time", "auto", "topk"]
    assert said.endswith(f"treespec chat --target {target} --drafter lookup\n")
    assert len(said.splitlines()) <= 24


def test_each_side_of_a_race_shows_what_it_would_show_alone():
    seen, now = [], 0

    def pieces(seconds):
        nonlocal now
        for number in range(4):
            now += seconds
            yield Piece(f"{number}\n", [number], drafted=number > 1)

    sides = [Side("slow", pieces(5)), Side("fast", pieces(1))]
    for _ in race(sides, lambda: now):
        seen.append(tuple(side.tokens for side in sides))
    assert seen == [(1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert [side.shown.plain for side in sides] == ["0\n1\n2\n3\n"] * 2
    assert [side.seconds for side in sides] == [20, 4]
    assert table_of(sides).row_count == 3


@pytest.mark.parametrize("terminal", [True, False])
def test_columns_grow_on_a_terminal_alone(home, terminal, capsys):
    spec = load(f"{home}/target", f"{home}/head", dtype="float32")
    compare(spec, 2, Console(force_terminal=terminal, width=80))
    said = capsys.readouterr().out
    assert "> Why is the sky blue?" in said
    assert ("treespec; what it drafted" in said) == terminal
