"""Tables that fit a terminal without breaking a word or a number, and a verdict that says what they say."""

import io
import re

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from treespec.eval.report import Report, Table, markdown, markdown_lines, show, terminal_lines
from treespec.eval.verdict import MeasuredPair, interval, sentences

TREES = ("", "2x4", "dynamic:depth=5,topk=6,nodes=24", "sampled:nodes=26,depth=6", "chain:5")
VERIFIERS = ("baseline", "topk", "rrs-wo", "traversal", "layer:greedy", "typical (lossy)")
NAMES = ("τ", "tokens/s", "speedup", "by question", "identical", "rest of drafting", "humanities", "推理")


def random_table(rng, brackets):
    def figure():
        value = f"{rng.uniform(0, 300):.2f}"
        return value + (f" ({rng.uniform(0, 300):.2f}–{rng.uniform(0, 300):.1f})" if brackets else "")

    columns = [str(rng.choice(NAMES)) for _ in range(rng.integers(1, 12))]
    rows = []
    for _ in range(rng.integers(1, 8)):
        labels = [str(rng.choice(names)) for names in (VERIFIERS, TREES, ("0", "0.6", "1"))]
        rows.append([*labels, *(figure() for _ in columns)])
    return Table("Speed", ["Verifier", "Tree", "T"], columns, rows, brief=bool(rng.integers(2)))


@pytest.mark.parametrize("width", [50, 80, 100, 250])
@pytest.mark.parametrize("seed", range(20))
def test_no_line_is_wider_than_the_terminal_and_nothing_is_broken(width, seed):
    rng = np.random.default_rng(seed)
    table = random_table(rng, brackets=seed % 2 == 0)
    lines = terminal_lines(table, width)
    assert max(map(cell_len, lines)) <= width
    shown = {word for line in lines for word in line.split()}
    for row in table.rows:
        for figure in row[3:]:
            value, *bracket = figure.split()
            assert value in shown
            assert table.brief or set(bracket) <= shown
        for part in re.findall(r"[^\s,:@/]+", " ".join(row[:3])):
            assert any(part in word for word in shown)
    assert {word for name in table.columns for word in name.split()} <= shown


def test_a_table_that_fits_is_one_line_a_row():
    table = Table("", ["Verifier", "T"], ["τ", "speedup"], [["topk", "0", "3.10 (2.90–3.30)", "1.50 (1.40–1.60)"]])
    assert terminal_lines(table, 80) == [
        "Verifier  T                 τ           speedup",
        "────────  ─  ────────────────  ────────────────",
        "topk      0  3.10 (2.90–3.30)  1.50 (1.40–1.60)",
    ]


def test_a_table_too_wide_is_cut_between_columns_and_repeats_its_labels():
    table = Table("", ["Verifier"], ["first", "second", "third"], [["topk", "11.11", "22.22", "33.33"]])
    assert terminal_lines(table, 24) == [
        "Verifier  first  second",
        "────────  ─────  ──────",
        "topk      11.11   22.22",
        "",
        "Verifier  third",
        "────────  ─────",
        "topk      33.33",
    ]


def test_a_long_name_is_broken_after_its_marks():
    tree, head = "dynamic:depth=5,topk=6,nodes=24", "FasterDecoding-medusa-vicuna-7b-v1.3"
    table = Table("", ["Tree", "Head"], ["τ", "tokens/s"], [[tree, head, "3.14", "100.0 (90.0–110.0)"]])
    assert terminal_lines(table, 60)[2:] == [
        "dynamic:depth=5,  FasterDecoding-  3.14  100.0 (90.0–110.0)",
        "topk=6,nodes=24   medusa-vicuna-",
        "                  7b-v1.3",
    ]


def test_a_name_longer_than_the_terminal_is_cut_and_not_the_figures():
    table = Table("", ["Tree"], ["τ"], [["x" * 200, "3.14"]])
    assert terminal_lines(table, 40)[-1].endswith("…  3.14")
    assert max(map(cell_len, terminal_lines(table, 40))) <= 40


def test_a_column_without_a_figure_is_left_out():
    table = Table("", ["Verifier", "Tree"], ["τ", "speedup"], [["topk", "", "3.14", ""], ["rrs", "", "2.10", ""]])
    assert terminal_lines(table, 80)[0].split() == ["Verifier", "τ"]
    assert markdown_lines(table)[0] == "| Verifier |    τ |"


@pytest.mark.parametrize("seed", range(10))
def test_markdown_reads_well_as_text_and_back(seed):
    table = random_table(np.random.default_rng(seed), brackets=True)
    lines = markdown_lines(table)
    assert len({cell_len(line) for line in lines}) == 1
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    empty = [all(not row[i] for row in table.rows) for i in range(3)] + [False] * len(table.columns)
    kept = [i for i, unused in enumerate(empty) if not unused]
    assert cells[0] == [[*table.labels, *table.columns][i] for i in kept]
    assert cells[2:] == [[row[i] for i in kept] for row in table.rows]


def test_what_names_hold_cannot_change_the_terminal_or_the_table():
    table = Table("a\x1b]0;title\x07", ["Name"], ["|"], [["evil\x1b[2J\u202e name", "a|b\nc"]])
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
    pairs = [
        MeasuredPair("topk@auto", 0.0, 120.0, figure(1.5, 1.4, 1.6)),
        MeasuredPair("rrs", 0.0, 110.0, figure(1.4, 1.3, 1.5), of_fastest=figure(0.92, 0.9, 0.95)),
        MeasuredPair("single", 0.0, 119.0, figure(1.49, 1.3, 1.6), of_fastest=figure(0.99, 0.95, 1.02)),
        MeasuredPair("topk@auto", 1.0, 50.0, figure(0.7, 0.65, 0.75)),
        MeasuredPair("kseq", 1.0, 80.0, figure(1.05, 0.97, 1.12)),
        MeasuredPair("typical", 1.0, 99.0, figure(1.3, 1.2, 1.4), lossless=False),
    ]
    assert sentences(pairs) == [
        "At temperature 0 the fastest is topk@auto: 1.50 (1.40–1.60) times plain decoding. "
        "As fast within the 95% interval: single.",
        "At temperature 1 no pair is faster than plain decoding for certain. "
        "The best is kseq: 1.05 (0.97–1.12) times plain decoding.",
        "At temperature 1 these are faster, but change the law of the text: typical 1.30 (1.20–1.40).",
        "At temperature 1 these are slower than plain decoding: topk@auto 0.70 (0.65–0.75).",
    ]


def test_where_every_pair_is_slower_the_verdict_says_so():
    pairs = [MeasuredPair("topk", 1.0, 50.0, figure(0.7)), MeasuredPair("rrs", 1.0, 60.0, figure(0.9))]
    assert sentences(pairs) == [
        "At temperature 1 plain decoding is the fastest. The best pair is rrs: 0.90 times plain decoding.",
        "At temperature 1 these are slower than plain decoding: topk 0.70, rrs 0.90.",
    ]


def test_without_a_baseline_the_verdict_compares_pairs_alone():
    pairs = [MeasuredPair("topk", 0.0, 50.0, None), MeasuredPair("rrs", 0.0, 60.0, None)]
    assert sentences(pairs) == [
        "At temperature 0 the fastest is rrs: 60.0 tokens/s, without a baseline to compare with."
    ]


def test_a_figure_stands_everywhere_as_value_and_interval():
    assert interval(figure(1.234, 1.1, 1.4)) == "1.23 (1.10–1.40)"
    assert interval(figure(12.34), digits=1) == "12.3"
    assert interval(None) == interval(figure(None)) == ""
