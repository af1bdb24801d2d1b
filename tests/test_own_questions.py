"""Questions that the target writes: as many as asked for, all different and whole, the same in every run."""

from dataclasses import replace

import pytest
from refusals import complains
from regenerating import by_row, config_for, killed_after, lines_of, save_words_model, words_tokenizer

from treespec import load
from treespec.train.regenerate.magpie import normal, problem_of, user_turn
from treespec.train.regenerate.questions import drawn
from treespec.train.regenerate.run import QUESTIONS, regenerate

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
    config = config_for(model, None, tmp_path_factory.mktemp("own") / "whole", from_template=8, question_tokens=16)
    regenerate(config)
    return config


def test_there_are_as_many_different_questions_as_asked_for(whole):
    lines = lines_of(whole, QUESTIONS)
    questions = [line["question"] for line in lines if "question" in line]
    assert [line["number"] for line in lines] == list(range(len(lines)))
    assert len({normal(question) for question in questions}) == len(questions) == 8
    assert sorted(line["messages"][0]["content"] for line in by_row(whole).values()) == sorted(questions)
    assert {line["problem"] for line in lines if "problem" in line} <= {
        "no end", "empty", "broken characters", "repeats itself", "repeated",
    }  # fmt: skip


def test_a_question_is_the_targets_own_continuation_of_its_template(whole, model):
    spec = load(model, dtype="float32")
    prompt = "<s>user: "
    for line in lines_of(whole, QUESTIONS):
        if "question" not in line:
            continue
        seed = drawn(whole.seed, f"template-{line['number']}", "question")
        ids = spec.target.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        alone = spec.generate(ids, seed=seed, temperature=1.0, max_new_tokens=16, stop="<s>")
        assert line["question"] == alone.text.strip()


def test_questions_depend_on_neither_batch_nor_kill(whole, tmp_path):
    config = replace(whole, out=f"{tmp_path}/out", batch=3)
    killed_after(config, 2)
    with (tmp_path / "out" / QUESTIONS).open("a") as file:
        file.write('{"number": 9')
    regenerate(config)
    assert by_row(config) == by_row(whole)
    assert lines_of(config, QUESTIONS) == lines_of(whole, QUESTIONS)


def test_a_target_that_repeats_itself_is_given_up(model, tmp_path):
    config = config_for(model, None, tmp_path, from_template=3, temperature=1e-4, question_tokens=12, batch=16)
    with complains(r"of 60 questions that the target wrote, .* are broken or repeated"):
        regenerate(config)


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
    assert problem_of(question, cut=problem == "no end", special=False, filter="english") == problem
