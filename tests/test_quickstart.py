"""The quickstart: greedy completions with and without drafts, verifiers, all of it on one screen."""

import pytest
from commands import treespec
from rich.console import Console

from treespec import load
from treespec.cli.side_by_side import compare, race
from treespec.decoding.sequence import Piece
from treespec.decoding.stats import Stats
from treespec.requests.output import Stream


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
    def stream(seconds):
        stats = Stats()

        def pieces():
            for number in range(4):
                stats.seconds["total"] += seconds
                yield Piece(f"{number}", [number], drafted=number > 1)

        return Stream(pieces(), stats)

    turns = list(race([stream(5), stream(1)]))
    assert [side for side, _ in turns] == [0, 1, 1, 1, 1, 0, 0, 0]
    assert ["".join(piece.text for side, piece in turns if side == own) for own in (0, 1)] == ["0123"] * 2


@pytest.mark.parametrize("terminal", [True, False])
def test_columns_grow_on_a_terminal_alone(home, terminal, capsys):
    spec = load(f"{home}/target", f"{home}/head", dtype="float32")
    compare(spec, 2, Console(force_terminal=terminal, width=80))
    said = capsys.readouterr().out
    assert "> Why is the sky blue?" in said
    assert ("treespec; what it drafted" in said) == terminal
