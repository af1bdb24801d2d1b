"""Questions in FastChat's format: our own, a file's, and MT-Bench's."""

import json
from collections import Counter

from refusals import complains

from treespec.eval.questions import BUILTIN, Question, load_questions

CATEGORIES = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]


def test_builtin_is_two_questions_of_two_turns_in_each_category_of_mt_bench():
    questions, problems = load_questions("builtin")
    assert problems == []
    assert Counter(question.category for question in questions) == dict.fromkeys(CATEGORIES, 2)
    assert all(len(question.turns) == 2 for question in questions)
    assert not {question.question_id for question in questions} & set(range(81, 161))  # MT-Bench's
    assert len({turn for question in questions for turn in question.turns}) == 32
    for line in BUILTIN.read_text("utf-8").splitlines():
        entry = json.loads(line)
        if entry["category"] in ("math", "reasoning", "coding"):  # FastChat's judge wants references there
            assert len(entry["reference"]) == 2


def test_malformed_questions_are_named_by_line_and_the_rest_goes_on(tmp_path):
    path = tmp_path / "mine.jsonl"
    lines = [
        b'{"question_id": 1, "category": "math", "turns": ["1+1?", "And times 3?"], "reference": ["2", "6"]}',
        b'{"question_id": 2, "turns": ["1+1?"',
        b"",
        b'{"question_id": 1, "turns": ["again"]}',
        b'{"turns": ["who am I?"]}',
        b'{"question_id": 4, "turns": []}',
        b'{"question_id": 5, "turns": ["a", " "]}',
        b'{"question_id": 6, "turns": ["\\ud83d"]}',
        b'{"question_id": "7\xff", "turns": ["a"]}',
        b"[]",
        b'{"question_id": "qa-8", "turns": ["One turn is enough."]}',
    ]
    path.write_bytes(b"\r\n".join(lines))
    questions, problems = load_questions(str(path))
    assert questions == [
        Question(1, "math", ("1+1?", "And times 3?")),
        Question("qa-8", "general", ("One turn is enough.",)),
    ]
    assert [problem.split(": ")[0] for problem in problems] == [f"mine.jsonl:{n}" for n in (2, 4, 5, 6, 7, 8, 9, 10)]
    path.write_bytes(b"\n".join(lines[1:2]))
    with complains(r"no question in .*mine\.jsonl:1"):
        load_questions(str(path))
    with complains(r"builtin, mt-bench, .* or a JSONL file"):
        load_questions(str(tmp_path / "absent.jsonl"))
