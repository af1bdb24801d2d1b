"""Pages that are evidence: a header that says of what, drawings that say what the numbers say, files for a paper."""

import csv
import io
import shutil
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import pytest
from commands import complains, treespec

from treespec.eval.charts import build_bars, draw_plot, draw_table, list_legend
from treespec.eval.exports import format_table_csv, format_table_latex
from treespec.eval.header import RunHeader, format_days
from treespec.eval.page import iterate_exhibits, write_page
from treespec.eval.rebuild import rebuild_pages
from treespec.eval.report import EvalPage, EvalReport, Plot, Table, escape_cell, render_markdown

GOLDEN = Path(__file__).parent / "golden"
FACTS = {
    "target": "org/model",
    "head": "heads/mine",
    "questions": "mt-bench",
    "command": "treespec eval --target org/model",
    "device": "a processor, bfloat16",
    "versions": "torch 2",
    "date": "2026-01-02",
}
HEADER = RunHeader(**FACTS, number=80)


def figure(value, low=None, high=None):
    return {"value": value, "low": low, "high": high}


def table_of(*figures, **options):
    return Table("Speed", ["Name"], [{"Name": f"row {i}", "x": one} for i, one in enumerate(figures)], **options)


def test_a_page_cannot_be_made_without_its_header():
    for field in fields(RunHeader):
        with pytest.raises(TypeError, match=field.name):
            RunHeader(**{name: value for name, value in (FACTS | {"number": 80}).items() if name != field.name})
    with pytest.raises(TypeError, match="header"):
        EvalPage(title="Speed", report=EvalReport([], []))


def test_page_and_markdown_say_what_was_measured(tmp_path):
    write_page(EvalPage("Speed", HEADER, EvalReport([table_of(figure(1.5))], [])), tmp_path / "page.html")
    for name in ("page.html", "page.md"):
        text = (tmp_path / name).read_text()
        assert all(fact in text for fact in FACTS.values())
        assert "mt-bench (80)" in text
        assert "Small sample" not in text


def test_fewer_than_ten_questions_are_called_a_small_sample():
    cautions = {number: bool(RunHeader(**FACTS, number=number).caution) for number in (1, 9, 10, None)}
    assert cautions == {1: True, 9: True, 10: False, None: False}
    assert "Small sample (9 of" in render_markdown(EvalReport([], []), header=RunHeader(**FACTS, number=9))


def test_a_bar_has_the_length_of_the_printed_figure():
    table = table_of(figure(2.0), figure(1.001), figure(-1e-9), figure(0.004), None)
    assert [escape_cell(row["x"]) for row in table.rows] == ["2.00", "1.00", "0.00", "0.00", ""]
    assert [bar and bar.width for bar in build_bars(table, "x")] == [100, 50, 0, 0, None]
    assert build_bars(table_of(figure(0.0), figure(1e-4)), "x") == [None, None]


def test_a_negative_figure_has_a_bar_to_the_left_of_zero():
    left, right = build_bars(table_of(figure(-1.0, -2.0, 0.0), figure(2.0)), "x")
    assert (left.start, left.width, left.low, left.high) == (25, 25, 0, 50)
    assert (right.start, right.width, right.low) == (50, 50, None)


def test_the_legend_explains_what_is_drawn_and_nothing_else():
    assert list_legend(table_of("a text")) == []
    assert [mark for mark, _ in list_legend(table_of(figure(2.0)))] == ["bar"]
    assert [mark for mark, _ in list_legend(table_of(figure(2.0, 1.0, 3.0)))] == ["bar", "whisker"]
    marks = list_legend(table_of(figure(2.0), reference=1.0, reference_name="one token at a time"))
    assert [mark for mark, _ in marks] == ["bar", "one"]
    assert marks[1][1] == "1: one token at a time"


def test_lines_of_a_plot_differ_in_more_than_color():
    points = [(1.0, figure(1.0, 0.5, 1.5)), (3.0, figure(2.0))]
    plot = Plot("τ", "nodes", "tokens per cycle", {f"line {i}": points for i in range(24)})
    drawing = ElementTree.fromstring(draw_plot(plot))
    looks = [(group.attrib["stroke"], group[1].attrib["d"]) for group in drawing.findall("g")[24:]]
    assert len({mark for _, mark in looks}) == 8
    assert len(set(looks)) == 24
    texts = [text.text for text in drawing.iter("text")]
    assert {"nodes", "tokens per cycle", "line 23", "Vertical lines: 95 % intervals."} <= {*texts}
    assert "Vertical" not in draw_plot(Plot("τ", "nodes", "τ", {"one": [(1.0, figure(1.0))]}))


def test_each_table_and_plot_has_files_of_its_own(tmp_path):
    plot = Plot("τ by nodes", "nodes", "τ", {"rrs": [(4.0, figure(1.5, 1.25, 1.75))]})
    report = EvalReport([table_of(figure(1.5)), table_of("a text"), Table("Empty", [], [])], [], plots=[plot])
    assert [exhibit.name for exhibit in iterate_exhibits(report)] == ["speed", "speed-2", "tau-by-nodes"]
    write_page(EvalPage("Speed", HEADER, report), tmp_path / "page.html")
    files = sorted(path.name for path in (tmp_path / "page-figures").iterdir())
    assert files == ["speed-2.csv", "speed.csv", "speed.svg", "tau-by-nodes.csv", "tau-by-nodes.svg"]
    for file in (tmp_path / "page-figures").glob("*.svg"):
        assert ElementTree.parse(file).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    lines = (tmp_path / "page-figures" / "tau-by-nodes.csv").read_text().splitlines()
    assert lines == ["line,nodes,τ,τ low,τ high", "rrs,4.0,1.5,1.25,1.75"]


def test_csv_has_every_digit_of_a_figure_and_its_interval():
    table = table_of(figure(1 / 3, 0.25, 0.5), None)
    rows = list(csv.DictReader(io.StringIO(format_table_csv(table))))
    assert [float(rows[0][name]) for name in ("x", "x low", "x high")] == [1 / 3, 0.25, 0.5]
    assert rows[1] == {"Name": "row 1", "x": "", "x low": "", "x high": ""}


def test_latex_escapes_names_and_says_what_was_measured():
    table = Table("Speed & τ", ["Name"], [{"Name": "a_b%", "τ": figure(1.5, 1.0, 2.0)}])
    text = format_table_latex(table, RunHeader(**FACTS, number=3))
    assert r"a\_b\% & 1.50 (1.00--2.00) \\" in text
    assert r"\begin{tabular}{lr}" in text
    assert r"\caption{Speed \& $\tau$. Target: org/model" in text
    assert "Small sample" in text
    assert text.startswith("% treespec eval --target org/model\n")


def test_a_chart_of_a_table_names_rows_and_columns():
    table = Table("Speed", ["Method", "T"], [{"Method": "topk", "T": "0", "τ": figure(1.5, 1.0, 2.0)}], 1.0, "plain")
    texts = [text.text for text in ElementTree.fromstring(draw_table(table)).iter("text")]
    assert {"topk · T=0", "τ", "1.50 (1.00–2.00)"} <= {*texts}
    assert texts[-1].startswith("Bar: the number above it")
    assert texts[-1].endswith("Dashed: 1: plain")


@pytest.mark.parametrize("name, page", [("evaluation", "report"), ("tau", "tau"), ("acceptance", "acceptance")])
def test_report_makes_the_pages_of_an_earlier_run_again(name, page, tmp_path):
    """Those of golden files, which an earlier treespec wrote without a date."""
    run = tmp_path / name
    shutil.copytree(GOLDEN / name, run)
    for file in run.glob("*.html"):
        file.unlink()
    [(file, built)] = rebuild_pages(run)
    assert file == run / f"{page}.html"
    assert built.header.target == "target"
    assert (built.header.date == "not recorded") == (name != "evaluation")
    assert len(list((run / f"{page}-figures").glob("*.svg"))) >= 2
    assert file.read_text().count("<svg") > 10


def test_report_prints_latex_of_a_certificate(tmp_path, capsys):
    shutil.copy(GOLDEN / "certificate.json", tmp_path)
    assert treespec(f"report {tmp_path}/certificate.json --format latex") == 0
    assert r"\caption{Tests of losslessness. Target: target" in capsys.readouterr().out
    assert "No fault found in rrs." in (tmp_path / "certificate.html").read_text()


def test_report_refuses_what_holds_no_results(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    with complains("has no results: give the --out of eval"):
        rebuild_pages(tmp_path)
    with complains("holds no results of eval"):
        rebuild_pages(tmp_path / "other.json")


def test_days_of_a_run_are_its_first_and_last():
    assert format_days([]) == "not recorded"
    assert format_days([0.0, 1.0]) == "1970-01-01"
    assert format_days([90000.0, 0.0]) == "1970-01-01 to 1970-01-02"
