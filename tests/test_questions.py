"""Questions that go in and answers that come out, as FastChat and Spec-Bench read them."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from treespec.errors import InputError
from treespec.eval.mtbench.answers import Answer, append, read
from treespec.eval.questions import BUILTIN, Question, load_questions
from treespec.eval.suites.known import SUITES

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
    with pytest.raises(InputError, match=r"no question in .*mine\.jsonl:1"):
        load_questions(str(path))
    with pytest.raises(InputError, match=r"builtin, mt-bench, .* or a JSONL file"):
        load_questions(str(tmp_path / "absent.jsonl"))


def test_mt_bench_comes_from_the_hubs_cache_and_is_kept(tmp_path, monkeypatch):
    """Earlier versions had the hub's library keep it."""
    from huggingface_hub import constants

    line = b'{"question_id": 81, "category": "writing", "turns": ["a", "b"]}\n'
    hub, *_ = SUITES["mt-bench"].places
    suite = replace(SUITES["mt-bench"], sha256=hashlib.sha256(line).hexdigest(), places=(hub,))
    monkeypatch.setitem(SUITES, "mt-bench", suite)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "ours"))
    with pytest.raises(InputError, match="--questions FILE"):
        load_questions("mt-bench")

    # the cache as huggingface_hub lays it out
    folder, commit = tmp_path / f"spaces--{hub.repository.replace('/', '--')}", "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    cached = folder / "snapshots" / commit / hub.file
    cached.parent.mkdir(parents=True)
    cached.write_bytes(line)
    assert load_questions("mt-bench") == ([Question(81, "writing", ("a", "b"))], [])
    shutil.rmtree(folder)
    assert load_questions("mt-bench") == ([Question(81, "writing", ("a", "b"))], [])


def some_answers() -> list[Answer]:
    return [
        Answer(
            question_id=9001 + i,
            category=CATEGORIES[i],
            model_id="bench-rrs-wo",
            turns=["Zürich 🎵\u2028", "two\n"],
            decoding_steps=[2, 1],
            new_tokens=[5 + i, 3],
            wall_time=[0.5, 0.25],
            accept_lengths=[3, 2 + i, 3],
            extra={"temperature": 1.0} if i else {},
        )
        for i in range(3)
    ]


def test_answers_come_back_as_they_were_written(tmp_path):
    path = tmp_path / "a.jsonl"
    assert read(path) == []
    answers = some_answers()
    for answer in answers:
        append(path, answer)
    assert read(path) == answers
    assert len({answer.answer_id for answer in answers}) == 3


def test_a_line_is_what_the_formats_page_says(tmp_path):
    path = tmp_path / "a.jsonl"
    append(path, some_answers()[0])
    line = json.loads(path.read_text())
    assert list(line) == ["question_id", "category", "answer_id", "model_id", "choices", "tstamp", "checksum"]
    assert list(line["choices"][0]) == [
        "index", "turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"
    ]  # fmt: skip


def test_fastchats_and_spec_benchs_readers_find_what_they_need(tmp_path):
    path = tmp_path / "bench-rrs-wo.jsonl"
    for answer in some_answers():
        append(path, answer)

    # fastchat.llm_judge.common.load_model_answers, then run_judge_single with both turns
    with open(path, encoding="ascii") as lines:
        by_question = {entry["question_id"]: entry for entry in map(json.loads, lines)}
    assert [by_question[9001]["choices"][0]["turns"][turn] for turn in (0, 1)] == ["Zürich 🎵\u2028", "two\n"]

    # Spec-Bench's evaluation/speed.py, task mt_bench
    speeds, accepted = [], []
    with open(path, encoding="utf-8") as lines:
        for entry in map(json.loads, lines):
            if entry["category"] in CATEGORIES:
                choice = entry["choices"][0]
                speeds.append(sum(choice["new_tokens"]) / sum(choice["wall_time"]))
                accepted.extend(choice["accept_lengths"])
    assert np.mean(speeds) == pytest.approx((8 + 9 + 10) / 3 / 0.75)
    assert np.mean(accepted) == pytest.approx((8 + 9 + 10) / 9)


def test_fastchats_own_answers_can_be_read(tmp_path):
    path = tmp_path / "gpt-4.jsonl"
    path.write_text(
        '{"question_id": 81, "answer_id": "x", "model_id": "gpt-4", '
        '"choices": [{"index": 0, "turns": ["a", "b"]}], "tstamp": 1.5}\n'
    )
    (answer,) = read(path)
    assert (answer.question_id, answer.turns, answer.new_tokens) == (81, ["a", "b"], [])


def test_a_line_cut_anywhere_is_dropped_and_the_next_one_takes_its_place(tmp_path):
    answers = some_answers()
    path = tmp_path / "a.jsonl"
    for answer in answers[:2]:
        append(path, answer)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        assert read(path) == answers[:1]
        append(path, answers[2])
        assert read(path) == [answers[0], answers[2]]


STRANGE = b'{"question_id": 3, "model_id": "m", "answer_id": "1", "tstamp": 1, "choices": [{"turns": [1]}]}'
NO_ANSWERS = (b"{", b"[]", b"7", b'{"question_id": 3}', b"\xff", b"[" * 9999, b'{"choices": [[]]}', b"", STRANGE)


def test_any_other_line_that_is_no_answer_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "a.jsonl"
    append(path, some_answers()[0])
    append(path, some_answers()[1])
    first, second, _ = path.read_bytes().split(b"\n")
    changed = second.replace(b'"question_id": ', b'"question_id": 1')
    assert changed != second
    for bad in (*NO_ANSWERS, changed):
        path.write_bytes(b"\n".join([first, bad, second, b""]))
        with pytest.raises(InputError, match=r"a\.jsonl:2 is not an answer line"):
            read(path)


def test_a_damaged_last_line_is_dropped_and_the_next_one_takes_its_place(tmp_path):
    path, answers = tmp_path / "a.jsonl", some_answers()
    for answer in answers[:2]:
        append(path, answer)
    first, second, _ = path.read_bytes().split(b"\n")
    for bad in (*NO_ANSWERS, second.replace(b'"question_id": ', b'"question_id": 1')):
        path.write_bytes(b"\n".join([first, bad, b""]))
        assert read(path) == answers[:1]
        append(path, answers[2])
        assert read(path) == [answers[0], answers[2]]


def test_a_kill_loses_no_answer_whose_append_returned(tmp_path):
    path = tmp_path / "a.jsonl"
    writer = (
        "import itertools, sys; from treespec.eval.mtbench.answers import Answer, append\n"
        "for i in itertools.count():\n"
        "    append(sys.argv[1], Answer(i, 'math', 'm', ['x' * 50_000]))\n"
        "    print(i, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", writer, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(20):
        process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    acknowledged = 20 + len(process.stdout.read().splitlines())
    process.wait()
    kept = [answer.question_id for answer in read(path)]
    assert kept == list(range(len(kept)))
    assert len(kept) >= acknowledged
