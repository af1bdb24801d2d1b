"""Which answers are right: the last number, or code that passes its tests in a process with limits."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from refusals import complains

from treespec.eval.questions import load_questions
from treespec.eval.suites import sandbox
from treespec.eval.suites.checks import NumberCheck, PythonCheck, check_of

RIGHT = (
    "18",
    "$18",
    "18.00",
    "So 20 - 2 = 18.",
    "The final answer is $18.",
    "#### 18",
    "3, 18",
    "it is **18**",
    "20-18",
)
WRONG = ("", "eighteen", "-18", "1,8", "18 of 20", "180", "1.8", "18.5", "x = -18")


@pytest.mark.parametrize("answer", RIGHT)
def test_the_last_number_is_the_answer(answer):
    assert NumberCheck("18").right(answer)
    assert NumberCheck("1,234,567").right("about 1234567.0")
    assert NumberCheck("-5").right("It falls to -5 degrees.")
    assert NumberCheck("-5").right("It costs -$5.")


@pytest.mark.parametrize("answer", WRONG)
def test_another_last_number_or_none_is_wrong(answer):
    assert not NumberCheck("18").right(answer)


PROMPT = 'import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef root(x):\n    """The root of half of it."""\n'
TEST = "def check(candidate):\n    assert candidate(8) == 2\n    assert candidate(18) == 3\n"
ROOT = PythonCheck(PROMPT, TEST, "root")
WHOLE = "def root(x):\n    return math.sqrt(half(x))\n"


@pytest.mark.parametrize(
    "answer",
    [
        f"Here you are:\n```python\n{WHOLE}```\nIt calls `half`.",
        WHOLE,
        f"```\nprint('an example')\n```\n```py\n{WHOLE}```",
        f"```python\n{PROMPT}    return half(x) ** 0.5\n",
        "    return math.sqrt(half(x))",
        "return math.sqrt(half(x))",
        f"```python\r\n{WHOLE}\nif __name__ == '__main__':\n    print(root(int(input())))\n```",
    ],
)
def test_code_that_passes_is_right_however_it_is_wrapped(answer):
    assert ROOT.right(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "I cannot.",
        WHOLE.replace("half(x)", "x"),
        f"{WHOLE}exit(0)\n",
        f"{WHOLE}import os\nos._exit(0)\n",
        WHOLE.replace("    return", "    raise SystemExit\n    return"),
        WHOLE.replace("root", "roots"),
    ],
)
def test_code_that_does_not_pass_every_test_is_wrong(answer):
    assert not ROOT.right(answer)


@pytest.mark.parametrize(
    "program",
    [
        "open('file', 'w').write('x')",
        "import pathlib; pathlib.Path('file').write_text('x')",
        "import os; os.open('file', os.O_CREAT | os.O_WRONLY)",
        "import os; os.remove({victim!r})",
        "import shutil, os; shutil.rmtree(os.path.dirname({victim!r}))",
        "import os; os.rename({victim!r}, 'here')",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.system('true')",
        "import os; os.fork()",
        "import multiprocessing.util as u, sys; u.spawnv_passfds(sys.executable.encode(), [b'python', b'-c', b''], ())",
        "import socket; socket.socket().connect(('127.0.0.1', 9))",
        "import ctypes; ctypes.CDLL(None)",
        "memory = bytearray(2 << 30)",
        "import numpy",
    ],
)
def test_a_program_that_writes_starts_connects_or_takes_much_is_stopped(program, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("whole")
    assert not sandbox.runs(program.format(victim=str(victim)))
    assert victim.read_text() == "whole"


def test_a_program_has_its_time_and_no_more():
    started = time.monotonic()
    assert not sandbox.runs("while True: pass", seconds=1.0)
    assert not sandbox.runs("import time; time.sleep(60)", seconds=1.0)
    assert time.monotonic() - started < 20


def test_a_program_sees_neither_our_packages_nor_our_environment(monkeypatch):
    monkeypatch.setenv("SECRET", "word")
    assert sandbox.runs("import os; assert 'SECRET' not in os.environ")
    assert not sandbox.runs("import treespec")
    assert sandbox.runs("import os; assert os.listdir() == []")
    assert sandbox.runs("import os, sys; print('much' * 10**6); os.write(1, b'x'); sys.stderr.write('x')")
    assert "SECRET" in os.environ


def test_where_no_program_can_run_an_error_says_so_instead_of_wrong_answers(monkeypatch):
    sandbox.check_works.cache_clear()
    monkeypatch.setattr(sandbox.sys, "executable", "/bin/false")
    with complains(r"--run-code: an empty program does not end well"):
        ROOT.right(WHOLE)


def test_a_program_ends_without_its_supervisor():
    """It may have been killed."""
    command = [sys.executable, "-I", "-S", str(sandbox.INSIDE), "1"]
    said = subprocess.run(command, input=b"word\nimport time\ntime.sleep(60)", timeout=30, capture_output=True)
    assert said.returncode == -signal.SIGALRM
    assert said.stdout == b""


def test_a_file_of_questions_may_bring_checks_of_its_own(tmp_path):
    lines = [
        {"question_id": 1, "turns": ["1+1?"], "check": {"kind": "number", "answer": "2"}},
        {"question_id": 2, "turns": ["Sing."]},
        {"question_id": 3, "turns": ["2+2?"], "check": {"kind": "nunber", "answer": "4"}},
        {"question_id": 4, "turns": ["3+3?"], "check": {"kind": "number"}},
        {"question_id": 5, "turns": ["4+4?"], "check": {"kind": "number", "answer": "eight"}},
        {"question_id": 6, "turns": ["5+5?"], "check": "10"},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    questions, problems = load_questions(str(file))
    assert [question.question_id for question in questions] == [1, 2]
    assert [problem.partition(": ")[0] for problem in problems] == [f"mine.jsonl:{n}" for n in (3, 4, 5, 6)]
    assert "known: number, python" in problems[0]
    assert [q.question_id for q in questions if q.check] == [1]
    assert check_of(lines[0]["check"]).right("two? 2.")
