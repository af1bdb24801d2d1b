"""Whose answers an evaluation drafts from: nobody's, unless it is asked."""

import json

import pytest
from evaluating import config_in, save_models

from treespec.errors import InputError
from treespec.eval.mtbench.answers import read
from treespec.eval.mtbench.run import evaluate


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("memory")
    save_models(home)
    return home


def cycles(home, out, memory, drafter="suffix", **options):
    """Of each answer, of the configuration that drafts."""
    wanted = {"head": None, "drafter": drafter, "verifier": "topk", "memory": memory, "warm_up": 1, "limit": 2}
    evaluate(config_in(home, home / out, **wanted | options))
    (file,) = [file for file in (home / out / "answers").glob("*.jsonl") if "baseline" not in file.name]
    return file, {answer.question_id: sum(answer.decoding_steps) for answer in read(file)}


def asked_twice(home):
    """Two questions that are the same, so that the second one's answer is that of the first."""
    file = home / "twice.jsonl"
    lines = [{"question_id": number, "category": "a", "turns": ["the user asks"]} for number in (1, 2)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def test_no_answer_is_drafted_from_another_ones_unless_asked(home):
    questions = asked_twice(home)
    _, alone = cycles(home, "none", "none", questions=questions)
    assert alone[1] == alone[2]  # warm-up, baseline and the question before told nothing
    file, together = cycles(home, "run", "run", questions=questions)
    assert together[1] == alone[1] > together[2]

    # a resumed run remembers what the first one was told
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0])
    assert cycles(home, "run", "run", questions=questions)[1] == together


def test_a_kept_memory_is_read_and_not_written(home):
    questions, folder = asked_twice(home), home / "kept"
    file, alone = cycles(home, "source", "none", questions=questions)
    tokens = read(file)[0].extra["token_ids"][0]
    from treespec import load

    spec = load(str(home / "target"), drafter=f"suffix:{folder}", verifier="topk")
    spec.decoder.drafter.remember("", tokens)
    before = sorted((file.name, file.read_bytes()) for file in folder.rglob("*.safetensors"))
    _, known = cycles(home, "read", "kept", drafter=f"suffix:{folder}", questions=questions)
    assert max(known.values()) < alone[1]
    assert sorted((file.name, file.read_bytes()) for file in folder.rglob("*.safetensors")) == before
    with pytest.raises(InputError, match="there is no folder"):
        cycles(home, "missing", "kept", drafter=f"suffix:{folder}s", questions=questions)
    with pytest.raises(InputError, match=r"--memory kept drafts from the answers in a folder: name it"):
        cycles(home, "nameless", "kept", drafter="suffix:tokens=5000", questions=questions)
    with pytest.raises(InputError, match="--memory run begins with no answers and keeps none"):
        cycles(home, "refused", "run", drafter=f"suffix:{folder}", questions=questions)
