"""The commands that load a pair: they answer as the API does, and show what they did."""

import json
import shlex
import shutil

import pytest
from commands import treespec
from rich.console import Console

from treespec import load
from treespec.cli.side_by_side import interleave_streams, show_side_by_side
from treespec.draft.calibration import load_calibration
from treespec.engine.output import Stream
from treespec.engine.request import Piece
from treespec.engine.stats import TAU_MEANING, Stats


@pytest.fixture(scope="module")
def pair(home):
    """A target and a head for it, as directories."""
    return f"{home}/target", f"{home}/head"


def test_generate_answers_one_prompt_or_several_together_as_the_api_does(pair, capsys):
    texts = ["the question", "answers", "the user asks"]
    line = f"generate --target {pair[0]} --head {pair[1]} --max-new-tokens 8 --dtype float32 --batch 2"
    spec = load(*pair, dtype="float32")
    for asked in (texts[:1], texts):
        assert treespec(" --prompt ".join([line, *map(shlex.quote, asked)])) == 0
        wanted = [spec.generate([{"role": "user", "content": text}], max_new_tokens=8) for text in asked]
        printed = capsys.readouterr()
        assert printed.out == "\n\n".join(one.text for one in wanted) + "\n"
        assert f"{sum(one.stats.new_tokens for one in wanted)} tokens · τ " in printed.err
        assert TAU_MEANING in printed.err
    assert treespec(f"{line} --prompt a --prompt '{'long ' * 600}'") == 2
    assert "the target's context holds 256" in capsys.readouterr().err.splitlines()[-1]


def test_a_head_from_elsewhere_gets_a_calibration_and_a_draft_vocabulary(pair, tmp_path, capsys):
    target, head = pair
    own = shutil.copytree(head, tmp_path / "head")
    text = tmp_path / "text.txt"
    text.write_text("no")
    models = f"--target {target} --head {own}"
    line = f"calibrate {models} --depth 3 --positions 40"
    for options, complaint in (
        (f"--text {text}", "the text is too short"),
        ("--draft-vocab 20", "--draft-vocab needs --text"),
    ):
        assert treespec(f"{line} {options}") == 2
        assert complaint in capsys.readouterr().err
    (own / "draft_vocab.json").write_text("damaged")
    text.write_text("the user asks and the assistant answers the question " * 12)
    assert treespec(f"{line} --draft-vocab 20 --text {text}") == 0
    said = capsys.readouterr()
    assert "The head drafts 20 tokens, which are 100.0% of the text" in said.out
    assert f"{own}/calibration.json" in said.err
    assert "of the most likely drafts are right" in said.err
    assert {"0.01", "0.3", "0.6", "1"} == load_calibration(own).rates.keys()
    assert len(load(target, str(own)).head.vocabulary) == 20
    drafting = "--tree eagle --verifier traversal --temperature 1"
    assert treespec(f"generate {models} {drafting} --prompt 'the question' --max-new-tokens 8") == 0


def test_generate_takes_what_a_request_may_ask(pair, capsys):
    target, head = pair
    asked = {"temperature": 1.0, "seed": 3, "max_new_tokens": 9, "min_tokens": 5, "frequency_penalty": 0.7}
    line = f"generate --target {target} --head {head} --dtype float32 --prompt 'the user' --n 2 --tree 2x2"
    line += " --verifier rrs-wo --temperature 1 --seed 3 --max-new-tokens 9 --min-tokens 5 --frequency-penalty 0.7"
    line += """ --logit-bias 7=-inf --logit-bias 9=1.5 --chat-template-kwargs '{"enable_thinking": false}'"""
    assert treespec(line) == 0
    message = [{"role": "user", "content": "the user"}]
    bias = {"logit_bias": {7: float("-inf"), 9: 1.5}}
    wanted = load(target, head, "2x2", "rrs-wo", dtype="float32").generate(message, n=2, **bias, **asked)
    assert capsys.readouterr().out == "\n\n".join(output.text for output in wanted) + "\n"


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


def test_what_cannot_be_traced_is_one_line(home, capsys):
    assert treespec(f"trace --target {home}/target --prompt a --drafter none") == 2
    assert "--drafter none drafts nothing" in capsys.readouterr().err


def test_it_fits_thirty_lines_on_a_pipe(home, capsys):
    target = f"{home}/target"
    assert treespec(f"quickstart --target {target} --max-new-tokens 6") == 0
    said = capsys.readouterr()
    assert "times as fast; 3 of 3 texts are the same" in said.out
    assert "rounding" not in said.out
    table = said.out.partition("     verifier")[2].splitlines()
    assert [line[5:27].rstrip() for line in table[1:4]] == ["one token at a time", "auto", "topk"]
    assert said.err.endswith(f"treespec chat --target {target} --drafter suffix:tokens=0\n")
    assert len((said.out + said.err).splitlines()) <= 30


def test_each_side_of_a_race_shows_what_it_would_show_alone():
    def stream(seconds):
        stats = Stats()

        def pieces():
            for number in range(4):
                stats.seconds["total"] += seconds
                yield Piece(f"{number}", [number], drafted=number > 1)

        return Stream(pieces(), stats)

    turns = list(interleave_streams([stream(5), stream(1)]))
    assert [side for side, _ in turns] == [0, 1, 1, 1, 1, 0, 0, 0]
    assert ["".join(piece.text for side, piece in turns if side == own) for own in (0, 1)] == ["0123"] * 2


@pytest.mark.parametrize("terminal", [True, False])
def test_columns_grow_on_a_terminal_alone(home, terminal, capsys):
    spec = load(f"{home}/target", f"{home}/head", dtype="float32")
    show_side_by_side(spec, 2, Console(force_terminal=terminal, width=80))
    said = capsys.readouterr().out
    assert "> Why is the sky blue?" in said
    assert ("treespec; what it drafted" in said) == terminal
