"""Questions that the target writes: all different and whole, the same in every run."""

from dataclasses import replace

import pytest
from refusals import complains
from regenerating import by_row, config_for, killed_after, lines_of, save_words_model, words_tokenizer

from treespec import load
from treespec.train.regenerate.magpie import normal, problem_of, user_turn
from treespec.train.regenerate.questions import drawn
from treespec.train.regenerate.run import LEFT_OUT, regenerate

CHATML = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\\n' + m['content'] + '</s>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)
VICUNA = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' ' }}{% endfor %}{{ 'assistant:' }}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_words_model(tmp_path_factory.mktemp("own") / "model")


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    config = config_for(model, None, tmp_path_factory.mktemp("own") / "whole", from_template=12, question_tokens=16)
    regenerate(config)
    return config


PROBLEMS = {f"question: {name}" for name in ("no end", "empty", "broken characters", "repeats itself", "repeated")}


def test_each_question_is_answered_or_left_out_and_no_two_are_the_same(whole):
    rows, left_out = by_row(whole), lines_of(whole, LEFT_OUT)
    assert len(rows) >= 4
    assert {*rows, *(line["row"] for line in left_out)} == {f"template-{number}" for number in range(12)}
    assert len({normal(line["messages"][0]["content"]) for line in rows.values()}) == len(rows)
    assert {line["problem"] for line in left_out} <= PROBLEMS


def test_a_question_is_the_targets_own_continuation_of_its_template(whole, model):
    spec = load(model, dtype="float32")
    prompt = spec.target.tokenizer("<s>user: ", add_special_tokens=False)["input_ids"]
    for row, line in by_row(whole).items():
        options = {"seed": drawn(whole.seed, row, "question"), "max_new_tokens": 16}
        alone = spec.generate(prompt, temperature=1.0, stop="<s>", **options)
        assert line["messages"][0]["content"] == alone.text.strip()


def test_questions_depend_on_neither_batch_nor_kill(whole, tmp_path):
    config = replace(whole, out=f"{tmp_path}/out", batch=3, from_template=6)
    killed_after(config, 2)
    regenerate(replace(config, from_template=12))
    assert by_row(config) == by_row(whole)


def test_a_target_that_repeats_itself_is_asked_a_question_once(model, tmp_path):
    config = config_for(model, None, tmp_path, from_template=9, temperature=1e-4, question_tokens=12, batch=4)
    result = regenerate(config)
    assert result.conversations <= 1
    assert result.left_out.total() == 9 - result.conversations


@pytest.mark.parametrize(
    "template, before, end",
    [(CHATML, "<s>user\n", "</s>"), (VICUNA, "user:", "assistant:")],
)
def test_a_users_turn_is_cut_out_of_the_template(model, template, before, end):
    spec = load(model, dtype="float32")
    spec.target.tokenizer.chat_template = template
    ids, stop = user_turn(spec)
    assert ids == words_tokenizer()(before, add_special_tokens=False)["input_ids"]
    assert stop == (end,)


def test_a_template_that_does_not_mark_the_users_turn_is_refused(model):
    spec = load(model, dtype="float32")
    spec.target.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with complains("does not mark a user's turn"):
        user_turn(spec)


@pytest.mark.parametrize(
    "question, problem",
    [
        ("Why is the sky blue?", None),
        ("Why is the sky", "no end"),
        ("Why \ufffd is it", "broken characters"),
        ("and the sky is blue " * 5, "repeats itself"),
        ("Was ist das und wie heisst die", "not english"),
    ],
)
def test_broken_questions_are_known(question, problem):
    assert problem_of(question, cut=problem == "no end", filter="english") == problem
