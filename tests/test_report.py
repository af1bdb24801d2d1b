"""Tables that fit a terminal without breaking a word or a number, and a verdict that says what they say."""

import io
import re

import numpy as np
import pytest
from evaluating import pair
from rich.cells import cell_len
from rich.console import Console

from treespec.eval.intervals import FEW
from treespec.eval.report import Report, Table, markdown, markdown_lines, show
from treespec.eval.verdict import noise_of, sentences

TREES = ("", "2x4", "dynamic:depth=5,topk=6,nodes=24", "sampled:nodes=26,depth=6", "chain:5")
FEW_SAID = "too few to say what is faster or slower: ask 10 or more."
VERIFIERS = ("baseline", "topk", "rrs-wo", "traversal", "layer:greedy", "typical (lossy)")
LABELS = ["Verifier", "Tree", "T"]
NAMES = ("τ", "tokens/s", "speedup", "by question", "identical", "rest of drafting", "humanities", "推理")


def random_table(rng, brackets):
    def figure():
        value = f"{rng.uniform(0, 300):.2f}"
        return value + (f" ({rng.uniform(0, 300):.2f}–{rng.uniform(0, 300):.1f})" if brackets else "")

    columns = [str(name) for name in rng.permutation(NAMES)[: rng.integers(1, len(NAMES) + 1)]]
    rows = []
    for _ in range(rng.integers(1, 8)):
        labels = [str(rng.choice(names)) for names in (VERIFIERS, TREES, ("0", "0.6", "1"))]
        rows.append(dict(zip(LABELS, labels, strict=True)) | {name: figure() for name in columns})
    return Table("Speed", LABELS, rows)


def terminal_lines(table, width):
    file = io.StringIO()
    show(Report([table], []), Console(file=file, width=width))
    return [line.rstrip() for line in file.getvalue().splitlines() if line.strip()][1:]


@pytest.mark.parametrize("width", [50, 80, 100, 250])
@pytest.mark.parametrize("seed", range(20))
def test_no_line_is_wider_than_the_terminal_and_no_figure_is_broken(width, seed):
    rng = np.random.default_rng(seed)
    table = random_table(rng, brackets=seed % 2 == 0)
    lines = terminal_lines(table, width)
    assert max(map(cell_len, lines)) <= width
    for row in table.rows:
        for figure in [*row.values()][3:]:
            assert any(figure in line for line in lines)
    shown = {word for line in lines for word in line.split()}
    assert {word for name in table.columns for word in name.split()} <= shown


def test_a_table_too_wide_is_cut_between_columns_and_repeats_its_labels():
    table = Table("-", ["Verifier"], [{"Verifier": "topk", "first": "11.11", "second": "22.22", "third": "33.33"}])
    lines = [line.split() for line in terminal_lines(table, 27)]
    assert lines[0] == ["Verifier", "first", "second"]
    assert lines[2] == ["topk", "11.11", "22.22"]
    assert lines[3] == ["Verifier", "third"]
    assert lines[5] == ["topk", "33.33"]


def test_a_long_name_is_wrapped_and_not_the_figures():
    table = Table("-", ["Tree"], [{"Tree": "x" * 200, "τ": "3.14"}])
    lines = terminal_lines(table, 40)
    assert sum(line.count("x") for line in lines) == 200
    assert "3.14" in lines[2]
    assert max(map(cell_len, lines)) <= 40


def test_a_column_without_a_figure_is_left_out():
    rows = [{"Verifier": "topk", "Tree": "", "τ": "3.14", "speedup": ""}, {"Verifier": "rrs", "τ": "2.10"}]
    table = Table("-", ["Verifier", "Tree"], rows)
    assert terminal_lines(table, 80)[0].split() == ["Verifier", "τ"]
    assert markdown_lines(table)[0] == "| Verifier |    τ |"


@pytest.mark.parametrize("seed", range(10))
def test_markdown_reads_well_as_text_and_back(seed):
    table = random_table(np.random.default_rng(seed), brackets=True)
    lines = markdown_lines(table)
    assert len({cell_len(line) for line in lines}) == 1
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    kept = [name for name in table.rows[0] if any(row[name] for row in table.rows)]
    assert cells[0] == kept
    assert cells[2:] == [[row[name] for name in kept] for row in table.rows]


def test_what_names_hold_cannot_change_the_terminal_or_the_table():
    table = Table("a\x1b]0;title\x07", ["Name"], [{"Name": "evil\x1b[2J\u202e name", "|": "a|b\nc"}])
    report = Report([table], ["note\x1b[31m", "a [bold]mark[/bold] and :smile:"], ["fast\x9b2J"])
    file = io.StringIO()
    show(report, Console(file=file, width=80, force_terminal=True, color_system=None))
    for text in (file.getvalue(), markdown(report)):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", re.sub(r"\x1b\[0?m|\x1b\[1m", "", text))
        assert "[bold]mark[/bold] and :smile:" in text
    assert r"a\|b c" in markdown(report)


def figure(value, low=None, high=None):
    return {"value": value, "low": low, "high": high}


def test_the_verdict_names_the_fastest_its_equals_and_what_is_slower():
    greedy = [
        pair("topk@auto", figure(1.5, 1.4, 1.6), 120.0),
        pair("rrs", figure(1.4, 1.3, 1.5), 110.0, of_fastest=figure(0.92, 0.9, 0.95)),
        pair("single", figure(1.49, 1.3, 1.6), 119.0, of_fastest=figure(0.97, 0.95, 0.99)),
    ]
    sampled = [
        pair("topk@auto", figure(0.7, 0.65, 0.75), 50.0, temperature=1.0, of_fastest=figure(0.6, 0.5, 0.7)),
        pair("kseq", figure(1.05, 0.97, 1.12), 80.0, temperature=1.0),
        pair("typical", figure(1.3, 1.2, 1.4), 99.0, lossless=False, of_fastest=figure(1.2, 1.1, 1.3)),
    ]
    assert sentences(greedy, FEW, 0.02) == [
        "At temperature 0 the fastest is topk@auto: 1.50 (1.40–1.60) times plain decoding. "
        "As fast within interval and noise: single.",
    ]
    assert sentences(sampled, FEW, 0.02) == [
        "At temperature 1 these are faster, but change the distribution of the completion: typical 1.30 (1.20–1.40).",
        "At temperature 1 these are slower than plain decoding: topk@auto 0.70 (0.65–0.75).",
        "At temperature 1 these are neither faster nor slower for certain: "
        "kseq 1.05 (0.97–1.12), whose interval holds 1.",
    ]


def test_where_every_pair_is_slower_the_verdict_says_so():
    pairs = [pair("topk", figure(0.7), 50.0), pair("rrs", figure(0.9), 60.0)]
    assert sentences(pairs, 80, 0.02) == [
        "At temperature 0 plain decoding is the fastest. The best pair is rrs: 0.90 times plain decoding.",
        "At temperature 0 these are slower than plain decoding: topk 0.70, rrs 0.90.",
    ]


@pytest.mark.parametrize(
    "measured, questions, noise, said",
    [
        (pair("auto", figure(1.13, 1.07, 1.2), tau=1.0), 80, 0.01, "as drafts brought nothing (τ 1.000)."),
        (pair("auto", figure(1.1, 1.04, 1.2)), 80, 0.05, "(1.04–1.20), inside the clock's noise of ±5.0 %."),
        (pair("auto", figure(2.0, 1.9, 2.1)), 9, 0.01, f"9 questions are {FEW_SAID}"),
        (pair("auto", None), 80, None, "not measured twice, so the clock's noise is unknown."),
    ],
)
def test_what_the_clock_or_chance_may_have_made_is_called_neither_faster_nor_slower(measured, questions, noise, said):
    (line,) = sentences([measured], questions, noise)
    assert line.startswith("At temperature 0 ")
    assert line.endswith(said)


def test_the_clocks_noise_is_how_far_the_interval_of_the_baseline_over_itself_reaches_from_1():
    assert noise_of(figure(1.01, 0.98, 1.04)) == pytest.approx(0.04)
    assert noise_of(figure(0.9, 0.8, 1.1)) == pytest.approx(0.25)
    assert noise_of(figure(1.0)) is noise_of(None) is None
