"""The quickstart's target and its conversations: whole or absent, loadable, learnt, and the same every time."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from training import flipped
from transformers import AutoModelForCausalLM, AutoTokenizer

from treespec.errors import InputError
from treespec.train.toy import tiny_target
from treespec.train.toy.stdlib_text import HELD_OUT, TRAIN, library_files, make_text
from treespec.train.toy.tiny_target import TinyTargetConfig, new_model, schedule, train_target

STEMS = {"heapq", "textwrap", "bisect", "shlex", "fractions", "topics"}
TINY = TinyTargetConfig(
    layers=2, hidden=32, heads=2, kv_heads=1, intermediate=64, vocab=300, context=128,
    seconds=2.0, batch=4, length=32, long_length=64,
)  # fmt: skip
QUIET = Console(quiet=True)
DIALOGUE = [
    {"role": "user", "content": "What does f do?"},
    {"role": "assistant", "content": "It returns 1."},
    {"role": "user", "content": "Show me the code."},
    {"role": "assistant", "content": "def f():\n    return 1"},
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = [f for f in library_files() if f.stem in STEMS]
    return make_text(tmp_path_factory.mktemp("text") / "text", files)


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    losses: list[float] = []
    out = tmp_path_factory.mktemp("target") / "target"
    train_target(out, text, TINY, lambda step: losses.append(step.loss), QUIET)
    return out, losses


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def test_conversations_alternate_and_no_turn_is_empty(text):
    for conversation in lines(text / TRAIN) + lines(text / HELD_OUT):
        messages = conversation["messages"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert messages
        assert all(m["content"].strip() for m in messages)


def test_split_is_disjoint_in_ids_and_answers(text):
    train, held_out = lines(text / TRAIN), lines(text / HELD_OUT)
    assert train
    assert held_out
    ids = [c["id"] for c in train + held_out]
    assert len(ids) == len(set(ids))

    def answers(part):
        return {m["content"] for c in part for m in c["messages"] if m["role"] == "assistant"}

    assert answers(train).isdisjoint(answers(held_out))


def test_text_is_the_same_every_time(text, tmp_path):
    files = [f for f in library_files() if f.stem in STEMS]
    again = make_text(tmp_path / "again", files)
    assert all((again / name).read_bytes() == (text / name).read_bytes() for name in (TRAIN, HELD_OUT))


def test_what_does_not_parse_is_passed_over(tmp_path):
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "good.py").write_text(
        'def f():\n    """Return the one number that this function knows."""\n    return 1\n'
    )
    made = make_text(tmp_path / "text", [tmp_path / "bad.py", tmp_path / "good.py"])
    (conversation,) = lines(made / TRAIN) + lines(made / HELD_OUT)
    assert conversation["id"] == "good.f"


def test_files_without_documentation_are_refused_and_leave_nothing(tmp_path):
    (tmp_path / "bad.py").write_text("def f(:\n")
    with pytest.raises(InputError, match="no documented Python"):
        make_text(tmp_path / "text", [tmp_path / "bad.py"])
    assert not (tmp_path / "text").exists()


def test_loss_falls(trained):
    _, losses = trained
    tenth = max(1, len(losses) // 10)
    assert sum(losses[-tenth:]) < 0.9 * sum(losses[:tenth])


def test_target_loads_through_the_auto_classes_and_generates(trained):
    out, _ = trained
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.config.vocab_size == len(tokenizer) == TINY.vocab
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    ids = tokenizer.apply_chat_template(DIALOGUE[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=4, do_sample=False)
    assert answer.shape[1] > ids["input_ids"].shape[1]
    assert torch.isfinite(model(answer).logits).all()


def test_template_round_trips_and_marks_the_answers(trained):
    tokenizer = AutoTokenizer.from_pretrained(trained[0])
    encoded = tokenizer.apply_chat_template(DIALOGUE, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    assert tokenizer.decode(ids) == (
        "<s>A chat about Python. USER: What does f do? ASSISTANT: It returns 1.</s>"
        " USER: Show me the code. ASSISTANT: def f():\n    return 1</s>"
    )
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == (
        " It returns 1.</s> def f():\n    return 1</s>"
    )
    asked = tokenizer.apply_chat_template(DIALOGUE[:3], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids[: len(asked)] == asked


def test_any_text_survives_the_tokenizer(trained):
    tokenizer = AutoTokenizer.from_pretrained(trained[0])
    text = "naïve  façade\t\n\n日本 🙂 it 's ."
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_finished_target_is_kept(trained, text):
    out, _ = trained
    before = {f.name: f.stat().st_mtime_ns for f in out.iterdir()}
    steps = []
    assert train_target(out, text, TINY, steps.append, QUIET) == out
    assert not steps
    assert {f.name: f.stat().st_mtime_ns for f in out.iterdir()} == before


def test_interrupted_training_leaves_nothing(text, tmp_path):
    def interrupt(step):
        if step.number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_target(tmp_path / "target", text, TINY, interrupt, QUIET)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [TRAIN, "checksums.json"])
def test_damage_in_what_was_kept_is_named(text, tmp_path, name):
    copy = shutil.copytree(text, tmp_path / "text")
    flipped(copy / name, 0.5)
    with pytest.raises(InputError, match=str(copy / name)):
        make_text(copy)
    shutil.rmtree(copy)
    copy.write_text("")
    for make in (make_text, lambda out: train_target(out, text, TINY, console=QUIET)):
        with pytest.raises(InputError, match=f"{copy} is a file"):
            make(copy)
        with pytest.raises(InputError, match=r"cannot write .*Not a directory"):
            make(copy / "text")


def test_what_a_kill_left_is_removed(text, tmp_path):
    for left in (".text-ab12cd34", ".text.4194999.tmp"):  # of an older version, and of a process that ended
        (tmp_path / left).mkdir()
    make_text(tmp_path / "text", [f for f in library_files() if f.stem == "heapq"])
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_a_target_that_diverges_is_not_saved(text, tmp_path, monkeypatch):
    def overflowing(config, tokenizer):
        model = new_model(config, tokenizer)
        model.model.norm.weight.data[0] = math.inf
        return model

    monkeypatch.setattr(tiny_target, "new_model", overflowing)
    with pytest.raises(InputError, match="diverged at step 1"):
        train_target(tmp_path / "target", text, TINY, console=QUIET)
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="nan"):
        train_target(tmp_path / "target", text, replace(TINY, seconds=math.nan), console=QUIET)


def test_learning_rate_rises_then_falls_to_nothing():
    rates = [schedule(i / 100, 0.1) for i in range(101)]
    assert rates[0] > 0
    assert max(rates) == pytest.approx(1) == rates[10]
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0, abs=1e-12)


def test_vocabulary_without_room_for_bytes_is_refused(text, tmp_path):
    with pytest.raises(InputError, match="vocabulary is 100"):
        train_target(tmp_path / "target", text, TinyTargetConfig(vocab=100, seconds=1), console=QUIET)
