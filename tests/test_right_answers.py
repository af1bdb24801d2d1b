"""Right answers beside the baseline's: the same at temperature 0, and figures that say how far apart they are."""

import re
from dataclasses import replace

import pytest
from evaluating import config_in, page_of, write_questions

from treespec.cli.measure import evaluate as command
from treespec.eval.figures import right_figures
from treespec.eval.intervals import paired_difference
from treespec.eval.ledger import Ledger
from treespec.eval.questions import Question
from treespec.eval.run import evaluate, judge
from treespec.eval.suites import sandbox
from treespec.eval.suites.checks import NumberCheck
from treespec.eval.verdict import right_sentences


def question(number, category, check):
    return {"question_id": number, "category": category, "turns": [f"Question {number}?"], "check": check}


PASSES = {"kind": "python", "prompt": "", "test": "check = print", "entry_point": "len"}  # whatever compiles
QUESTIONS = [
    *(question(i, "sums", {"kind": "number", "answer": str(i)}) for i in range(3)),
    *(question(i, "code", PASSES) for i in range(3, 5)),
    {"question_id": 5, "category": "songs", "turns": ["Sing."]},
]


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    return write_questions(tmp_path_factory.mktemp("right") / "q.jsonl", QUESTIONS)


def asked(right):
    return [Question(1, "sums", ("?",), NumberCheck(right))]


def verdicts(ledger):
    return {(e["contestant"], e["question_id"]): e["right"] for e in ledger.of("checked")}


def ran(monkeypatch):
    """Notes every program that is run, as it is run."""
    programs = []
    runs = sandbox.runs
    monkeypatch.setattr("treespec.eval.suites.checks.runs", lambda program: programs.append(program) or runs(program))
    return programs


def test_right_answers_are_counted_and_the_same_at_temperature_0(home, questions, tmp_path, monkeypatch, capsys):
    """Without --run-code no code runs; with it, the same words to the same question run once."""
    programs = ran(monkeypatch)
    config = config_in(home, tmp_path / "out", verifier="topk", max_new_tokens=6, warm_up=0, questions=questions)
    rows = evaluate(config)["rows"]
    assert [row["right"]["answers"] for row in rows] == [3, 3]
    assert programs == []
    before = verdicts(Ledger(tmp_path / "out"))
    command.__wrapped__(replace(config, run_code=True))
    said = capsys.readouterr()
    assert "--run-code runs what the target writes" in said.err
    assert len(programs) == 2
    after = verdicts(Ledger(tmp_path / "out"))
    assert len(after) == 2 * 5
    assert before.items() <= after.items()
    rows = evaluate(config)["rows"]  # verdicts stay
    for row in rows:
        right = [verdict for (name, _), verdict in after.items() if name == row["name"]]
        assert (row["right"]["answers"], row["right"]["right"]) == (5, sum(right))
    baseline, pair = rows
    assert baseline["right"]["difference"] is None
    assert pair["right"]["same"] == 5
    assert pair["right"]["difference"]["value"] == 0
    page = page_of(tmp_path / "out" / "report.md")
    count = f"{pair['right']['right']} of 5"
    assert f"At temperature 0 every pair answers the very questions rightly that the baseline does: {count}." in page
    assert re.search(rf"\| {count} \|", page)


def test_another_check_of_the_same_question_judges_its_answers_anew(tmp_path):
    """A mended reference changes no question, so the answers stay."""
    Ledger(tmp_path).append("head", {"format": 2})
    Ledger(tmp_path).append("completion", {"contestant": "m", "question_id": 1, "turns": ["It is 18."]})
    for number, right in (("18", True), ("9", False), ("18", True)):
        judge(Ledger(tmp_path), asked(number), False, lambda step: None)
        assert verdicts(Ledger(tmp_path)) == {("m", 1): right}
    judge(ledger := Ledger(tmp_path), asked("18"), False, lambda step: None)
    assert len(ledger.of("checked")) == 3  # it was judged already


def test_categories_can_be_asked_alone(home, questions, tmp_path):
    options = {"questions": questions, "categories": "songs, code", "limit": 2}
    config = config_in(home, tmp_path, verifier="topk", max_new_tokens=3, warm_up=0, **options)
    summary = evaluate(config)
    assert list(summary["rows"][0]["categories"]) == ["code"]
    assert summary["rows"][0]["right"] is None
    assert "Right answers" not in (tmp_path / "report.md").read_text()


def test_a_difference_of_pairs_has_an_interval_by_hand():
    """Of 10 pairs 3 were gained and 1 lost; half an answer more in each of the four cells makes them 12."""
    mine = [True] * 5 + [False] * 5
    baseline = [False] * 3 + [True] * 3 + [False] * 4
    figure = paired_difference(mine, baseline)
    assert figure["value"] == pytest.approx(0.2)
    assert figure["low"] == pytest.approx(2 / 12 - 1.959964 * ((5 / 12 - 4 / 144) / 12) ** 0.5)
    assert figure["high"] == pytest.approx(2 / 12 + 1.959964 * ((5 / 12 - 4 / 144) / 12) ** 0.5)
    equal = paired_difference(mine, mine)
    assert equal["low"] < equal["value"] == 0 < equal["high"]
    assert right_figures(mine, baseline)["same"] == 6


def row(mine, baseline, temperature=1.0):
    figures = right_figures(mine, baseline)
    return {"name": "pair", "temperature": temperature, "lossless": True, "right": figures}


def test_sentences_say_what_right_answers_show():
    many = [i % 2 == 0 for i in range(100)]
    few = [i % 10 == 0 for i in range(100)]
    near = [not right if i < 4 else right for i, right in enumerate(many)]
    (same,) = right_sentences([row(many, many, 0.0)])
    (within,) = right_sentences([row(near, many)])
    (apart,) = right_sentences([row(few, many)])
    assert "temperature 0 every pair answers the very questions rightly that the baseline does: 50 of 100." in same
    assert "within the 95% interval" in within
    assert "is not the baseline's: pair -40.0 (" in apart
    assert right_sentences([row(few, many) | {"lossless": False}]) == []
