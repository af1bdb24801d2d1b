"""report.html: made from files alone, complete in itself, and whatever a model says stays text."""

import json
import re
from html.parser import HTMLParser

import pytest
import torch
from evaluating import config_in, save_models
from tracing import cycle_of, own

from treespec.decoding.sequence import Piece
from treespec.errors import InputError
from treespec.eval.mtbench.config import EvalConfig
from treespec.eval.mtbench.run import evaluate
from treespec.eval.page.charts import Bar, Chart, Grid, Group, Stack
from treespec.eval.page.page import Page, rendered
from treespec.eval.page.picture import BOX, HEIGHT, expected, picture
from treespec.eval.page.trees import Said, Traced, Trees, chosen, read_trees
from treespec.eval.report import Report, Table
from treespec.model.processor import processor
from treespec.options import command_line
from treespec.requests.events import Cycle

EVIL = "</text></svg><script>alert(1)</script><img src=x onerror='alert(2)'>\" onload=\"{{ 7 * 7 }}&amp;"
ENDLESS = {"meta", "wbr", "br"}


class Tags(HTMLParser):
    """Every tag with the names of its attributes; the text of what is no style."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.text = [], [], ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, tuple(name for name, _ in attributes)))
        if tag not in ENDLESS:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, tuple(name for name, _ in attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if "style" not in self.open else ""


def page_with(text):
    """A page that shows a text wherever a model, a file or an option may bring one."""
    cycle = cycle_of(texts=[text] * 3, own=own(text=text), answer=[Piece(text, [2], True), Piece(text, [9], False)])
    answer = [Said(text, drafted=True, first=True), Said(text, drafted=False, first=False)]
    traced = Traced(text, 0.0, 2, 1, answer, chosen([cycle]))
    bars = [Bar(text, 2.0, text, 1.5, 2.5, marker=3.0)]
    charts = [
        Chart("Speed", "", [Group(text, bars)], reference=1.0, marker="bound"),
        Chart("Time", "", [Group(text, [Stack(text, [1.0, 0.5], text)])], legend=["target", "rest"]),
        Grid("τ", "", [text], [(text, [1.5, None])]),
    ]
    report = Report([Table(text, [text], [text], [[text, text]])], [text], [text])
    return Page(text, text, report, charts, [("command", text), (text, text)], Trees({}, text, [traced]))


def test_text_from_outside_never_becomes_markup():
    harmless, evil = Tags(rendered(page_with("word"))), Tags(rendered(page_with(EVIL)))
    assert evil.tags == harmless.tags
    assert evil.text.count("<script>alert(1)</script>") > 20
    assert "{{ 7 * 7 }}&amp;" in evil.text
    assert not [name for _, names in evil.tags for name in names if name.startswith("on")]


def test_a_page_loads_nothing_from_elsewhere():
    html = rendered(page_with("word"))
    assert not re.findall(r"https?:|//|url\(|@import|\bsrc=|<link|<script", html)
    assert "default-src 'none'" in html


def test_control_characters_reach_the_page_as_symbols():
    html = rendered(page_with("a\x1b[31m\u202e\x00b"))
    assert not set("\x1b\u202e\x00") & set(html)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A finished evaluation of one question, and its config."""
    home, out = tmp_path_factory.mktemp("page"), tmp_path_factory.mktemp("out")
    save_models(home)
    changes = {"temperature": "0,1", "verifier": "topk,rrs@2x2", "limit": 1, "turns": 1, "warm_up": 0}
    config = config_in(home, out, **changes)
    evaluate(config)
    return home, out, config


def test_a_finished_evaluation_makes_the_page_again_without_models(measured):
    home, out, config = measured
    page, trees = (out / "report.html").read_text(), json.loads((out / "trees.json").read_text())
    names = [run["name"] for run in trees["traced"]]
    wanted = [f"{name}, temperature {heat}" for heat in (0, 1) for name in ("topk", "rrs 2x2")]
    assert names == wanted
    assert all(name in page for name in names)
    for name in ("target", "head"):
        (home / name).rename(home / f"{name} away")
    (out / "report.html").unlink()
    evaluate(config)
    for name in ("target", "head"):
        (home / f"{name} away").rename(home / name)
    assert (out / "report.html").read_text() == page


def test_recording_changes_no_answer(measured, tmp_path, monkeypatch):
    home, out, config = measured
    monkeypatch.setattr("treespec.eval.mtbench.page.record", lambda *_: None)
    evaluate(
        config_in(
            home,
            tmp_path,
            **{name: getattr(config, name) for name in ("temperature", "verifier", "limit")},
            turns=1,
            warm_up=0,
        )
    )
    for file in (out / "answers").iterdir():
        one, other = (json.loads(path.read_text()) for path in (file, tmp_path / "answers" / file.name))
        assert one["extra"]["token_ids"] == other["extra"]["token_ids"]
        assert one["choices"][0]["accept_lengths"] == other["choices"][0]["accept_lengths"]
    assert 'id="trees"' not in (tmp_path / "report.html").read_text()


def test_a_page_says_what_it_was_measured_on(measured):
    _, out, config = measured
    text = " ".join(Tags((out / "report.html").read_text()).text.split())
    assert "treespec eval --" in text
    assert "--verifier topk,rrs@2x2" in text
    for what in ("device", "dtype", "torch", "transformers", "system"):
        assert what in text
    if not torch.cuda.is_available():
        assert text.count(processor()) == 2  # among the settings, and below the tables
    words = command_line("eval", EvalConfig, {"out": "a b", "baseline": False, "turns": None, "max_new_tokens": 1024})
    assert words == "treespec eval --out 'a b' --no-baseline"
    assert config.out in text


def test_damaged_trees_are_named(tmp_path):
    assert read_trees(tmp_path) is None
    (tmp_path / "trees.json").write_text('{"traced": [{"cycles": 3}]}')
    with pytest.raises(InputError, match=r"trees\.json .* delete it to make the page without tree pictures"):
        read_trees(tmp_path)


def test_chosen_cycles_differ_in_length():
    def cycle(number, length):
        nodes = 5
        fields = {"tokens": [0] * nodes, "texts": ["a"] * nodes, "parents": [-1, 0, 1, 2, 3], "q": [None] * nodes}
        return cycle_of(number=number, path=list(range(1, length + 1)), p=[None, 0.5, 0.5, 0.5, 0.5], **fields)

    found = chosen([cycle(number, length) for number, length in enumerate([1, 0, 2, 4, 2, 4], 1)])
    assert [(one.cycle.number, one.why) for one in found] == [
        (2, "the shortest path"),
        (4, "the longest accepted path"),
        (5, "the median path"),
    ]
    assert [one.why for one in chosen([cycle(1, 2), cycle(2, 2)])] == ["the longest accepted path"]
    assert chosen([]) == []
    assert expected(cycle(1, 0)) == pytest.approx(0.5 + 0.25 + 0.125 + 0.0625)


def test_boxes_do_not_touch_and_children_stand_right_of_their_parents():
    parents = [-1, 0, 0, 1, 1, 2, 2, 4, 0]
    count = len(parents)
    tree: Cycle = cycle_of(
        tokens=[0] * count,
        texts=["word"] * count,
        parents=parents,
        q=[None] + [0.5] * (count - 1),
        p=[None] + [0.3] * (count - 1),
        path=[1, 4],
        own=own(at=4, p=0.2),
    )
    drawn = picture(tree)
    places = [(node.x, node.y) for node in drawn.nodes]
    assert len(set(places)) == len(places) == count + 1
    for node in drawn.nodes:
        assert 0 <= node.x <= drawn.width - BOX
        assert 0 <= node.y <= drawn.height - HEIGHT
        assert node.parent is None or node.x > node.parent.x + BOX
        for other in drawn.nodes:
            assert node is other or node.x != other.x or abs(node.y - other.y) >= HEIGHT
    assert [node.fate for node in drawn.nodes].count("accepted") == 2
    last = drawn.nodes[-1]
    assert (last.fate, last.parent is drawn.nodes[4]) == ("own", True)
    assert last.reach == pytest.approx(0.3 * 0.3 * 0.2)
