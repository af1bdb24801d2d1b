"""Right answers beside the baseline's: the same at temperature 0, and figures that say how far apart they are."""

import json
import os
import re
from dataclasses import replace

import pytest
from evaluating import answered, config_in, page_of, save_models
from scipy.stats import binomtest

from treespec.cli.evaluate import measure
from treespec.eval.mtbench.answers import Answer, append
from treespec.eval.mtbench.judge import judge, verdicts
from treespec.eval.mtbench.right import paired_difference, right_figures, right_sentences, wilson
from treespec.eval.mtbench.run import evaluate
from treespec.eval.suites import sandbox
from treespec.eval.suites.number import NumberCheck


def question(number, category, check):
    return {"question_id": number, "category": category, "turns": [f"Question {number}?"], "check": check}


PASSES = {"kind": "python", "prompt": "", "test": "check = print", "entry_point": "len"}  # whatever compiles
QUESTIONS = [
    *(question(i, "sums", {"kind": "number", "answer": str(i)}) for i in range(3)),
    *(question(i, "code", PASSES) for i in range(3, 5)),
    {"question_id": 5, "category": "songs", "turns": ["Sing."]},
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("right")
    save_models(folder)
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    return folder


def ran(monkeypatch):
    """Notes every program that is run, as it is run."""
    programs = []
    runs = sandbox.runs
    monkeypatch.setattr("treespec.eval.suites.python.runs", lambda program: programs.append(program) or runs(program))
    return programs


def test_right_answers_are_counted_and_the_same_at_temperature_0(home, tmp_path, monkeypatch, capsys):
    """Without --run-code no code runs; with it, the same words to the same question run once."""
    programs = ran(monkeypatch)
    config = config_in(home, tmp_path / "out", verifier="topk", max_new_tokens=6, warm_up=0)
    rows = evaluate(config)["configurations"]
    assert [row["right"]["answers"] for row in rows] == [3, 3]
    assert programs == []
    before = verdicts(tmp_path / "out")
    measure(replace(config, run_code=True))
    said = capsys.readouterr()
    assert "--run-code runs what the target writes" in said.err
    assert len(programs) == 2
    after = verdicts(tmp_path / "out")
    assert len(after) == 2 * 5
    assert before.items() <= after.items()
    rows = evaluate(config)["configurations"]  # verdicts stay
    for row, lines in zip(rows, answered(tmp_path / "out").values(), strict=True):
        right = [after[line.answer_id] for line in lines if line.answer_id in after]
        assert (row["right"]["answers"], row["right"]["right"]) == (5, sum(right))
    baseline, pair = rows
    assert baseline["right"]["difference"] is None
    assert pair["right"]["same"] == 5
    assert pair["right"]["difference"]["value"] == 0
    page = page_of(tmp_path / "out" / "summary.md")
    count = f"{pair['right']['right']} of 5"
    assert f"At temperature 0 every pair answers the very questions rightly that the baseline does: {count}." in page
    assert re.search(rf"\| {count} \|", page)
    assert "By category: tokens/s" in page


def test_another_check_of_the_same_question_judges_its_answers_anew(tmp_path):
    """A mended reference changes no question, so the answers stay."""
    answer = Answer(1, "sums", "baseline", ["It is 18."])
    append(tmp_path / "answers.jsonl", answer)
    for number, right in (("18", True), ("9", False), ("18", True)):
        judge(tmp_path, [tmp_path / "answers.jsonl"], {1: NumberCheck(number)}, False, lambda step: None)
        assert verdicts(tmp_path) == {answer.answer_id: right}


def test_questions_may_come_through_a_pipe(home, tmp_path):
    """It can be read once, as that of `--questions <(head -1 FILE)`."""
    out, into = os.pipe()
    os.write(into, json.dumps(QUESTIONS[0]).encode())
    os.close(into)
    config = config_in(home, tmp_path, verifier="topk", max_new_tokens=3, warm_up=0, questions=f"/dev/fd/{out}")
    rows = evaluate(config)["configurations"]
    os.close(out)
    assert [row["right"]["answers"] for row in rows] == [1, 1]


def test_categories_can_be_asked_alone(home, tmp_path):
    config = config_in(home, tmp_path, verifier="topk", max_new_tokens=3, warm_up=0, categories="songs, code", limit=2)
    summary = evaluate(config)
    assert list(summary["configurations"][0]["categories"]) == ["code"]
    assert summary["configurations"][0]["right"] is None
    assert "Right answers" not in (tmp_path / "summary.md").read_text()


def test_the_interval_of_a_share_is_wilsons():
    for right, answers in ((0, 12), (3, 12), (12, 12), (80, 164)):
        figure = wilson(right, answers)
        known = binomtest(right, answers).proportion_ci(method="wilson")
        assert figure["value"] == right / answers
        assert (figure["low"], figure["high"]) == (pytest.approx(known.low, abs=1e-6), pytest.approx(known.high))


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
    return {"model_id": "pair", "temperature": temperature, "lossless": True, "right": figures}


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
