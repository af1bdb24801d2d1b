"""Right answers: those whose last number is the right one, beside the baseline's."""

import re

import pytest
from evaluating import answered, config_in, page_of, write_questions

from treespec.eval.questions import Question
from treespec.eval.run import evaluate

RIGHT = (
    *("18", "$18", "18.00", "So 20 - 2 = 18.", "The final answer is $18.", "#### 18", "3, 18", "it is **18**", "20-18"),
    *[("1,234,567", "about 1234567.0"), ("-5", "It falls to -5 degrees."), ("-5", "It costs -$5.")],
)
WRONG = ("", "eighteen", "-18", "1,8", "18 of 20", "180", "1.8", "18.5", "x = -18")


@pytest.mark.parametrize("said, right", [(said, True) for said in RIGHT] + [(said, False) for said in WRONG])
def test_an_answer_is_right_if_its_last_number_is(said, right):
    number, text = ("18", said) if isinstance(said, str) else said
    assert Question(1, "sums", ("?",), number=number).right(text) is right
    assert Question(1, "sums", ("?",)).right(text) is None


def test_right_answers_are_counted_and_the_same_at_temperature_0(home, tmp_path):
    lines = [{"question_id": i, "category": "sums", "turns": [f"Question {i}?"], "number": str(i)} for i in range(3)]
    lines.append({"question_id": 5, "category": "songs", "turns": ["Sing."]})
    options = {"verifier": "topk", "max_new_tokens": 6, "warm_up": 0}
    questions = write_questions(tmp_path / "q.jsonl", lines)
    baseline, pair = evaluate(config_in(home, tmp_path / "out", questions=questions, **options))["rows"]
    for row in (baseline, pair):
        verdicts = [one["right"] for one in answered(tmp_path / "out")[row["name"]]]
        assert verdicts[3] is None
        assert (row["right"]["answers"], row["right"]["right"]) == (3, sum(verdicts[:3]))
    assert baseline["right"]["same"] is None
    assert pair["right"]["same"] == 3
    assert re.search(rf"\| {pair['right']['right']} of 3 ", page_of(tmp_path / "out" / "report.md"))

    options |= {"questions": questions, "categories": "songs", "limit": 2}
    summary = evaluate(config_in(home, tmp_path / "songs", **options))
    assert list(summary["rows"][0]["categories"]) == ["songs"]
    assert summary["rows"][0]["right"] is None
    assert "Right answers" not in (tmp_path / "songs" / "report.md").read_text()
