"""Tables that fit a terminal without breaking a word or a number, and a verdict that says what they say."""

import re

import numpy as np
import pytest
from evaluating import pair
from rich.cells import cell_len

from treespec.eval.intervals import FEW
from treespec.eval.report import Report, Table, markdown, markdown_lines
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


@pytest.mark.parametrize("width", [50, 80, 100, 250])
@pytest.mark.parametrize("seed", range(20))
def test_a_table_too_wide_is_cut_between_columns_and_repeats_its_labels(width, seed):
    """A part that is wider holds the labels and one column."""
    table = random_table(np.random.default_rng(seed), brackets=seed % 2 == 0)
    parts = [part.splitlines() for part in "\n".join(markdown_lines(table, width)).strip().split("\n\n")]
    cells = [[[cell.strip() for cell in line.split("|")[1:-1]] for line in part] for part in parts]
    labels = [name for name in LABELS if name in table.columns]
    for part, rows in zip(parts, cells, strict=True):
        assert max(map(cell_len, part)) <= width or len(rows[0]) == len(labels) + 1
        assert rows[0][: len(labels)] == labels
    assert labels + [name for rows in cells for name in rows[0][len(labels) :]] == [*table.columns]
    for number, row in enumerate(table.rows):
        assert [cell for rows in cells for cell in rows[2 + number][len(labels) :]] == [*row.values()][3:]


def test_a_column_without_a_figure_is_left_out():
    rows = [{"Verifier": "topk", "Tree": "", "τ": "3.14", "speedup": ""}, {"Verifier": "rrs", "τ": "2.10"}]
    assert markdown_lines(Table("-", ["Verifier", "Tree"], rows))[1] == "| Verifier |    τ |"


@pytest.mark.parametrize("seed", range(10))
def test_markdown_reads_well_as_text_and_back(seed):
    table = random_table(np.random.default_rng(seed), brackets=True)
    _, *lines = markdown_lines(table)
    assert len({cell_len(line) for line in lines}) == 1
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    kept = [name for name in table.rows[0] if any(row[name] for row in table.rows)]
    assert cells[0] == kept
    assert cells[2:] == [[row[name] for name in kept] for row in table.rows]


def test_what_names_hold_cannot_change_the_terminal_or_the_table():
    table = Table("a\x1b]0;title\x07", ["Name"], [{"Name": "evil\x1b[2J\u202e name", "|": "a|b\nc"}])
    report = Report([table], ["note\x1b[31m", "a [bold]mark[/bold] and :smile:"], ["fast\x9b2J"])
    text = markdown(report)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "[bold]mark[/bold] and :smile:" in text
    assert r"a\|b c" in text


def figure(value, low=None, high=None):
    return {"value": value, "low": low, "high": high}


def test_the_verdict_names_what_is_faster_the_fastest_first_and_what_is_slower():
    pairs = [
        pair("topk", figure(0.7, 0.65, 0.75), 50.0),
        pair("kseq", figure(1.05, 0.97, 1.12), 80.0),
        pair("rrs", figure(1.2, 1.1, 1.3), 90.0),
        pair("typical (lossy)", figure(1.3, 1.2, 1.4), 99.0),
        pair("single", figure(0.9), 60.0),
    ]
    assert sentences(pairs, FEW, 0.02) == [
        "these are faster than plain decoding, the fastest first: "
        "typical (lossy) 1.30 (1.20–1.40); rrs 1.20 (1.10–1.30).",
        "these are neither faster nor slower for certain: kseq 1.05 (0.97–1.12), whose interval holds 1.",
        "these are slower than plain decoding: single 0.90; topk 0.70 (0.65–0.75).",
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
    assert line.endswith(said)


def test_the_clocks_noise_is_how_far_the_interval_of_the_baseline_over_itself_reaches_from_1():
    assert noise_of(figure(1.01, 0.98, 1.04)) == pytest.approx(0.04)
    assert noise_of(figure(0.9, 0.8, 1.1)) == pytest.approx(0.25)
    assert noise_of(figure(1.0)) is noise_of(None) is None
