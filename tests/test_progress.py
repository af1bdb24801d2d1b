"""Steps go to standard error, whatever their text holds, and what was measured is left alone on standard output."""

import io

from rich.console import Console

from treespec.cli.terminal import remark, show_result, with_progress
from treespec.decoding.stats import TAU, Stats, figures, figures_of
from treespec.eval.common import Step
from treespec.eval.report import Report, Table, markdown

HOSTILE = "question [bold]x[/bold] [/nothing] \x1b]0;title\x07 \u202ereversed"


def work(config, report):
    for done in range(3):
        report(Step(done, 3, f"{HOSTILE} {done}"))
    return "result"


def test_through_a_pipe_every_step_is_a_line_of_standard_error(capsys):
    assert with_progress(work, None) == "result"
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [line.split()[0] for line in printed.err.splitlines()] == ["0/3", "1/3", "2/3"]
    assert "[bold]x[/bold] [/nothing]" in printed.err
    assert not {"\x1b", "\x07", "\u202e"} & set(printed.err)


def test_on_a_terminal_a_step_is_shown_as_it_is_and_does_nothing_else():
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None)
    assert with_progress(work, None, console) == "result"
    assert "[bold]x[/bold] [/nothing]" in file.getvalue()
    assert "\x1b]0;" not in file.getvalue()
    assert "\u202e" not in file.getvalue()


def test_a_pipe_gets_the_markdown_and_nothing_else(capsys):
    report = Report([Table("Speed", ["Verifier"], [{"Verifier": "topk", "τ": "3.10"}])], ["a note"], ["topk is fast."])
    show_result(report)
    remark("Answers are in /there")
    printed = capsys.readouterr()
    assert printed.out == markdown(report)
    assert printed.err == "Answers are in /there\n"


def test_figures_are_the_same_words_everywhere_and_explain_τ_where_they_are_asked_to():
    stats = Stats(new_tokens=32, accepted=[1] * 16)
    stats.seconds["total"] = 0.5
    assert figures_of(stats) == figures(32, 16, 0.5) == "32 tokens · τ 2.00 · 64.0 tokens/s"
    assert figures_of(stats, explain=True) == f"32 tokens · τ 2.00 ({TAU}) · 64.0 tokens/s"
    assert figures_of(Stats()) == "0 tokens · τ 0.00 · 0.0 tokens/s"
