"""report.html: made from files alone, complete in itself, and whatever a model says stays text."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from evaluating import config_in

from treespec.eval.config import EvalConfig
from treespec.eval.report import Report, Table, page
from treespec.eval.run import evaluate
from treespec.model.processor import processor
from treespec.options import command_line

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

    def handle_endtag(self, tag):
        assert tag in ENDLESS or self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if "style" not in self.open else ""


def page_with(text):
    """A page that shows a text wherever a model, a file or an option may bring one."""
    figure = {"value": 2.0, "low": 1.5, "high": 2.5}
    report = Report([Table(text, [text], [{text: text, f"{text} ": text, "b": figure}], 1.0)], [text], [text])
    more = {"setup": [("command", text), (text, text)], "subtitle": text}
    return page(report, text, **more)


def test_text_from_outside_never_becomes_markup():
    harmless, evil = Tags(page_with("word")), Tags(page_with(EVIL))
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
    monkeypatch.setattr("treespec.eval.run.load_own", None)
    (out / "report.html").unlink()
    evaluate(config)
    assert (out / "report.html").read_text() == page


def test_a_page_says_what_it_was_measured_on(measured):
    out, config = measured
    text = " ".join(Tags((out / "report.html").read_text()).text.split())
    assert "treespec eval --" in text
    assert "--verifier topk,rrs@2x2" in text
    for what in ("device", "dtype", "torch", "transformers"):
        assert what in text
    if not torch.cuda.is_available():
        assert text.count(processor()) == 2  # among the settings, and below the tables
    words = command_line("eval", EvalConfig, {"out": "a b", "baseline": False, "turns": None, "max_new_tokens": 1024})
    assert words == "treespec eval --out 'a b' --no-baseline"
    assert config.out in text
