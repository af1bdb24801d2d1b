"""Reports: tables that fit a terminal, a verdict that says what they say, and a page that is complete in itself."""

import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import config_in, summary_row
from rich.cells import cell_len
from rich.console import Console

from treespec.cli.terminal import print_remark, run_with_progress, show_result
from treespec.engine.stats import TAU_MEANING, Stats, format_figures, format_stats
from treespec.eval.benchmark import evaluate
from treespec.eval.common import ProgressStep
from treespec.eval.config import EvalConfig
from treespec.eval.header import RunHeader
from treespec.eval.intervals import MIN_QUESTIONS
from treespec.eval.page import render_page
from treespec.eval.report import EvalPage, EvalReport, Plot, Table, render_markdown, render_markdown_table
from treespec.eval.verdict import estimate_noise, write_sentences
from treespec.kernels.processor import describe_processor
from treespec.options import format_command_line

TREES = ("", "2x4", "dynamic:depth=5,topk=6,nodes=24", "eagle", "chain:5")
FEW_SAID = "too few to say what is faster or slower: ask 10 or more."
VERIFIERS = ("baseline", "topk", "rrs-wo", "traversal", "typical (lossy)")
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
    parts = [part.splitlines() for part in "\n".join(render_markdown_table(table, width)).strip().split("\n\n")]
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
    assert render_markdown_table(Table("-", ["Verifier", "Tree"], rows))[1] == "| Verifier |    τ |"


@pytest.mark.parametrize("seed", range(10))
def test_markdown_reads_well_as_text_and_back(seed):
    table = random_table(np.random.default_rng(seed), brackets=True)
    _, *lines = render_markdown_table(table)
    assert len({cell_len(line) for line in lines}) == 1
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    kept = [name for name in table.rows[0] if any(row[name] for row in table.rows)]
    assert cells[0] == kept
    assert cells[2:] == [[row[name] for name in kept] for row in table.rows]


def test_what_names_hold_cannot_change_the_terminal_or_the_table():
    table = Table("a\x1b]0;title\x07", ["Name"], [{"Name": "evil\x1b[2J\u202e name", "|": "a|b\nc"}])
    report = EvalReport([table], ["note\x1b[31m", "a [bold]mark[/bold] and :smile:"], ["fast\x9b2J"])
    text = render_markdown(report)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "[bold]mark[/bold] and :smile:" in text
    assert r"a\|b c" in text


def figure(value, low=None, high=None):
    return {"value": value, "low": low, "high": high}


def test_the_verdict_names_the_faster_ones_first_then_the_slower():
    pairs = [
        summary_row("topk", figure(0.7, 0.65, 0.75), 50.0),
        summary_row("kseq", figure(1.05, 0.97, 1.12), 80.0),
        summary_row("rrs", figure(1.2, 1.1, 1.3), 90.0),
        summary_row("typical (lossy)", figure(1.3, 1.2, 1.4), 99.0),
        summary_row("single", figure(0.9), 60.0),
    ]
    assert write_sentences(pairs, MIN_QUESTIONS, 0.02) == [
        "faster than plain decoding, the fastest first: typical (lossy) 1.30 (1.20–1.40); rrs 1.20 (1.10–1.30).",
        "no significant difference: kseq 1.05 (0.97–1.12), interval includes 1.",
        "slower than plain decoding: single 0.90; topk 0.70 (0.65–0.75).",
    ]


@pytest.mark.parametrize(
    "measured, questions, noise, said",
    [
        (summary_row("auto", figure(1.13, 1.07, 1.2), tau=1.0), 80, 0.01, "as drafts brought nothing (τ 1.000)."),
        (summary_row("auto", figure(1.1, 1.04, 1.2)), 80, 0.05, "(1.04–1.20), within timing noise (±5.0 %)."),
        (summary_row("auto", figure(2.0, 1.9, 2.1)), 9, 0.01, f"9 questions are {FEW_SAID}"),
        (summary_row("auto", None), 80, None, "not measured twice, so the clock's noise is unknown."),
    ],
)
def test_differences_within_noise_are_called_neither_faster_nor_slower(measured, questions, noise, said):
    (line,) = write_sentences([measured], questions, noise)
    assert line.endswith(said)


def test_clock_noise_is_the_interval_of_the_baseline_over_itself():
    assert estimate_noise(figure(1.01, 0.98, 1.04)) == pytest.approx(0.04)
    assert estimate_noise(figure(0.9, 0.8, 1.1)) == pytest.approx(0.25)
    assert estimate_noise(figure(1.0)) is estimate_noise(None) is None
    assert estimate_noise(figure(1.0, 0.0, 3.0)) == math.inf


EVIL = "</text></svg><script>alert(1)</script><img src=x onerror='alert(2)'>\" onload=\"{{ 7 * 7 }}&amp;"
ENDLESS = {"meta", "wbr", "br"}


class Tags(HTMLParser):
    """Every tag with the names of its attributes; the text of what is no style."""

    def __init__(self, html):
        super().__init__()
        self.tags = []
        self.open = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, tuple(name for name, _ in attributes)))
        if tag not in ENDLESS:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in ENDLESS or self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if "style" not in self.open else ""


def page_with(text):
    """A page that shows a text wherever a model, a file or an option may bring one."""
    figure = {"value": 2.0, "low": 1.5, "high": 2.5}
    table = Table(text, [text], [{text: text, f"{text} ": text, "b": figure}], 1.0, text)
    plot = Plot(text, text, text, {text: [(1.0, figure), (2.0, figure)]})
    facts = dict.fromkeys(("target", "head", "questions", "command", "device", "versions", "date"), text)
    report = EvalReport([table], [text], [text], [plot])
    return render_page(EvalPage(text, RunHeader(**facts, number=3), report))


def test_text_from_outside_never_becomes_markup():
    harmless = Tags(page_with("word"))
    evil = Tags(page_with(EVIL))
    assert evil.tags == harmless.tags
    assert evil.text.count("<script>alert(1)</script>") > 8
    assert "{{ 7 * 7 }}&amp;" in evil.text
    assert not [name for _, names in evil.tags for name in names if name.startswith("on")]


def test_a_page_loads_nothing_from_elsewhere():
    html = page_with("word")
    assert not re.findall(r"https?:|//|url\(|@import|\bsrc=|<link|<script", html)
    assert "default-src 'none'" in html


def test_control_characters_reach_the_page_as_symbols():
    html = page_with("a\x1b[31m\u202e\x00b")
    assert not set("\x1b\u202e\x00") & set(html)


@pytest.fixture(scope="module")
def measured(home, tmp_path_factory):
    """A finished evaluation of one question, and its config."""
    changes = {"temperature": "0,1", "verifier": "topk,rrs@2x2", "limit": 1, "turns": 1, "warm_up": 0}
    config = config_in(home, tmp_path_factory.mktemp("out"), **changes)
    evaluate(config)
    return Path(config.out), config


def test_a_finished_evaluation_makes_the_page_again_without_models(measured, monkeypatch):
    out, config = measured
    page = (out / "report.html").read_text()
    monkeypatch.setattr("treespec.eval.benchmark.load_own", None)
    (out / "report.html").unlink()
    evaluate(config)
    assert (out / "report.html").read_text() == page


def test_a_page_says_what_it_was_measured_on(measured):
    out, config = measured
    text = " ".join(Tags((out / "report.html").read_text()).text.split())
    assert "treespec eval --" in text
    assert "--verifier topk,rrs@2x2" in text
    for what in ("Device", "float32", "torch", "transformers", "Small sample (1 of at least 10"):
        assert what in text
    if not torch.cuda.is_available():
        assert describe_processor() in text
    words = format_command_line(
        "eval", EvalConfig, {"out": "a b", "baseline": False, "turns": None, "max_new_tokens": 1024}
    )
    assert words == "treespec eval --out 'a b' --no-baseline"
    assert config.out in text


HOSTILE = "question [bold]x[/bold] [/nothing] \x1b]0;title\x07 \u202ereversed"


def work(config, report):
    for done in range(3):
        report(ProgressStep(done, 3, f"{HOSTILE} {done}"))
    return "result"


def test_through_a_pipe_every_step_is_a_line_of_standard_error(capsys):
    assert run_with_progress(work, None) == "result"
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [line.split()[0] for line in printed.err.splitlines()] == ["0/3", "1/3", "2/3"]
    assert "[bold]x[/bold] [/nothing]" in printed.err
    assert not {"\x1b", "\x07", "\u202e"} & set(printed.err)


def test_showing_a_step_on_a_terminal_changes_nothing():
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None)
    assert run_with_progress(work, None, console) == "result"
    assert "[bold]x[/bold] [/nothing]" in file.getvalue()
    assert "\x1b]0;" not in file.getvalue()
    assert "\u202e" not in file.getvalue()


def test_a_pipe_gets_the_markdown_and_nothing_else(capsys):
    report = EvalReport(
        [Table("Speed", ["Verifier"], [{"Verifier": "topk", "τ": "3.10"}])], ["a note"], ["topk is fast."]
    )
    show_result(report)
    print_remark("Answers are in /there")
    printed = capsys.readouterr()
    assert printed.out == render_markdown(report)
    assert printed.err == "Answers are in /there\n"


def test_figures_have_the_same_words_everywhere_and_may_explain_τ():
    stats = Stats(new_tokens=32, accepted=[1] * 16)
    stats.seconds["total"] = 0.5
    assert format_stats(stats) == format_figures(32, 16, 0.5) == "32 tokens · τ 2.00 · 64.0 tokens/s"
    assert format_stats(stats, explain=True) == f"32 tokens · τ 2.00 ({TAU_MEANING}) · 64.0 tokens/s"
    assert format_stats(Stats()) == "0 tokens · τ 0.00 · 0.0 tokens/s"
