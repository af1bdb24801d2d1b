"""Regeneration: every row is answered once, whatever happens on the way; so are questions that the target writes."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as hf
from commands import complains, treespec
from models import GROUPED, TableConfig, TableModel, random_model
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from training import CHAT_TEMPLATE, list_learnt_answers, read_lines, read_rows, regenerate_config, write_question_data

from treespec import load
from treespec.api.engine import Engine
from treespec.api.spec import Spec
from treespec.demo.known import choose_default_drafter
from treespec.draft.heads.loading import build_new_head
from treespec.heads.checkpoint import save_head
from treespec.model.target import Target
from treespec.text.conversations import read_conversations
from treespec.text.encoding import encode_conversations
from treespec.train.regenerate.ask import ask_target
from treespec.train.regenerate.config import RegenerateConfig
from treespec.train.regenerate.magpie import find_problem, find_user_turn, normalize_question
from treespec.train.regenerate.questions import draw_number, matches_filter
from treespec.train.regenerate.run import CONVERSATIONS_FILE, LEFT_OUT_FILE, regenerate_answers

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", "system", ":", "why", "is", "the", "sky", "sea", "blue"]


def words_tokenizer():
    """One token a word; a user's turn begins with `<s> user :` and ends with `<s>`, an answer with `</s>`."""
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )


def save_words_model(folder, seed=3):
    """A random Llama over these words, which ends an answer of its own accord after some tokens."""
    changes = {"vocab_size": len(WORDS), "max_position_embeddings": 256}
    random_model(hf.LlamaConfig(**GROUPED | changes), seed=seed).save_pretrained(folder)
    words_tokenizer().save_pretrained(folder)
    return folder


forks = pytest.mark.skipif(
    torch.get_num_threads() > 1, reason="a forked process would wait for threads of OpenMP that it does not have"
)


def killed_after(config, rows):
    """Run in a process of its own, which kills itself when that number of rows is done."""
    child = os.fork()
    if child == 0:
        regenerate_answers(config, lambda done, *_: os.kill(os.getpid(), signal.SIGKILL) if done >= rows else None)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_words_model(tmp_path_factory.mktemp("regenerate") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_question_data(tmp_path_factory.mktemp("regenerate") / "data.jsonl")


@pytest.fixture(scope="module")
def whole(model, data, tmp_path_factory):
    """A run that nothing disturbed."""
    config = regenerate_config(model, data, tmp_path_factory.mktemp("regenerate") / "whole")
    regenerate_answers(config)
    return config


def test_every_question_is_answered_by_generate_with_its_own_seed(whole, model, data):
    spec = load(model, dtype="float32")
    asked = {one.source: one.messages for one in read_conversations(data)[0]}
    rows = read_rows(whole)
    assert {line["id"] for line in rows.values()} == asked.keys()
    assert {line["temperature"] for line in rows.values()} == {0.0, 1.0}
    assert {end for line in rows.values() for end in line["ended"]} == {"model", "max_new_tokens"}
    for key, line in rows.items():
        messages = line["messages"]
        assert messages[::2] == asked[line["id"]][: len(messages) : 2]
        for turn, (answer, tokens) in enumerate(zip(messages[1::2], line["tokens"], strict=True)):
            options = {"temperature": line["temperature"], "max_new_tokens": whole.max_new_tokens}
            alone = spec.generate(messages[: 2 * turn + 1], seed=draw_number(whole.seed, key, turn), **options)
            assert (answer["content"], tokens) == (alone.text, alone.stats.new_tokens)


def test_what_was_asked_and_generated_is_what_training_reads(whole, model):
    spec = load(model, dtype="float32")
    conversations, _ = read_conversations(f"{whole.out}/{CONVERSATIONS_FILE}")
    examples, report = encode_conversations(spec.target.tokenizer, conversations, None, 1000)
    expected = []
    for line in read_lines(whole):
        for turn in range(len(line["tokens"])):
            prompt = line["messages"][: 2 * turn + 1]
            options = {"temperature": line["temperature"]}
            seed = draw_number(whole.seed, line["row"], turn)
            answer = spec.generate(prompt, seed=seed, max_new_tokens=whole.max_new_tokens, **options)
            expected.append((spec.encode(prompt), answer.token_ids))
    assert sorted(list_learnt_answers(examples)) == sorted(expected)
    assert len(read_rows(whole)) == report.used <= len(examples) < len(expected)


def test_thoughts_of_the_target_stand_apart_from_its_words():
    """A target that always writes the same: its special tokens mark a thought, as gpt-oss' do."""
    tokenizer = words_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<think>", "</think>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<s>' + m['role'] + ': ' }}"
        "{% if m['thinking'] and loop.last %}{{ '<think>' + m['thinking'] + '</think>' }}{% endif %}"
        "{{ m['content'] + '</s>' }}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
    )
    said = tokenizer.convert_tokens_to_ids(
        ["assistant", ":", "<think>", "why", "is", "</think>", "sky", "blue", "</s>"]
    )
    model = TableModel(TableConfig(len(tokenizer), eos_token_id=2))
    with torch.no_grad():
        for before, last, following in zip(said, said[1:], said[2:], strict=False):
            model.model.table[before, last, following] = 99.0
    spec = Spec(Target(model, tokenizer), None)
    config = regenerate_config("m", "d", "o")
    with Engine(spec) as engine:
        messages = [{"role": "user", "content": "why"}]
        answer = ask_target(engine, config)(messages, 0, True)
    assert (answer.thought, answer.text.strip()) == ("why is", "sky blue")
    assert answer.message["reasoning_content"] == "why is"
    assert [*answer.token_ids] == said[2:]
    assert [*answer.prompt_ids] == spec.encode(messages)


def test_rows_of_older_versions_or_other_tokenizers_are_read_by_messages(whole, tmp_path):
    lines = read_lines(whole)
    earlier = [
        {name: value for name, value in line.items() if name not in ("input_ids", "loss_mask")} for line in lines
    ]
    others = [line | {"input_ids": [[0] * len(ids) for ids in line["input_ids"]]} for line in lines]
    rows = []
    for number, kept in enumerate((earlier, others)):
        file = tmp_path / f"{number}.jsonl"
        file.write_text("\n".join(map(json.dumps, kept)))
        examples, report = encode_conversations(words_tokenizer(), read_conversations(file)[0], None, 1000)
        rows.append([(one.input_ids.tolist(), one.loss_mask.tolist(), one.key, one.part) for one in examples])
        assert report.used == 12
    assert rows[0] == rows[1]


def test_an_answer_depends_on_neither_batch_nor_order(whole, model, data, tmp_path):
    backwards = tmp_path / "backwards.jsonl"
    backwards.write_text("\n".join(reversed(data.read_text().splitlines())))
    config = regenerate_config(model, backwards, tmp_path / "out", batch=1)
    regenerate_answers(config)
    assert read_rows(config) == read_rows(whole)


@forks
def test_no_kill_loses_or_doubles_a_row(whole, tmp_path):
    config = replace(whole, out=f"{tmp_path}/out")
    for rows in (1, 4, 9):
        killed_after(config, rows)
        assert len(read_rows(config)) < 12
        with (tmp_path / "out" / CONVERSATIONS_FILE).open("a") as file:  # what a kill in the middle of a line leaves
            file.write('{"id": "talk-0", "row": "4')
    regenerate_answers(config)
    assert read_rows(config) == read_rows(whole)
    before = (tmp_path / "out" / CONVERSATIONS_FILE).read_bytes()
    assert before == (Path(whole.out) / CONVERSATIONS_FILE).read_bytes()  # in the same order, too
    assert regenerate_answers(config).conversations == len(read_rows(whole))
    assert (tmp_path / "out" / CONVERSATIONS_FILE).read_bytes() == before


@pytest.mark.parametrize(
    "named, change",
    {
        "seed = 12, not 8": {"seed": 8},
        "max_new_tokens = 8, not 9": {"max_new_tokens": 9},
        "filter = 'all', not 'english'": {"filter": "english"},
    }.items(),
)
def test_rows_of_other_options_are_not_mixed(whole, change, named):
    with complains(named):
        regenerate_answers(replace(whole, **change))


def test_models_and_data_are_known_by_content(whole, data, tmp_path):
    config = replace(whole, out=f"{tmp_path}/out", limit=1)
    regenerate_answers(config)
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(data.read_bytes())
    regenerate_answers(replace(config, data=str(moved)))
    other = write_question_data(tmp_path / "other.jsonl", count=5)
    with complains("another content of data"):
        regenerate_answers(replace(config, data=str(other)))
    with complains("another content of target"):
        regenerate_answers(replace(config, target=str(save_words_model(tmp_path / "model", seed=4))))


def test_a_head_changes_no_greedy_answer(model, data, tmp_path):
    head = tmp_path / "head"
    save_head(build_new_head("eagle", Target.load(str(model), dtype="float32")), head)
    plain = regenerate_config(model, data, tmp_path / "plain", greedy=1.0)
    drafted = regenerate_config(
        model, data, tmp_path / "drafted", greedy=1.0, head=str(head), tree="2x2", verifier="greedy"
    )
    regenerate_answers(plain)
    regenerate_answers(drafted)
    assert read_rows(drafted) == read_rows(plain)
    assert {line["temperature"] for line in read_lines(plain)} == {0.0}


def test_what_cannot_be_asked_is_left_out_with_its_reason_once(model, tmp_path):
    asked = ["the sky", "the " * 30, "is the sea blue", "the sky"]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"messages": [{"role": "user", "content": text}]}) for text in asked))
    config = regenerate_config(model, data, tmp_path / "out", question_tokens=20)
    result = regenerate_answers(config)
    assert (result.conversations, dict(result.left_out)) == (2, {"a question is too long": 1})
    assert [line["id"] for line in read_lines(config, LEFT_OUT_FILE)] == ["2"]
    assert regenerate_answers(config) == result
    assert len(read_lines(config, LEFT_OUT_FILE)) == 1


def test_english_and_code_pass_and_other_languages_do_not():
    for text in (
        "What is the capital of France?",
        "def f(x):\n    return [x, x + 1]",
        "SELECT id FROM talks WHERE la = 'x'",
        "Translate “das ist gut” for me, please, and say what it is",
    ):
        assert matches_filter(text, "english"), text
    for text in (
        "Was ist die Hauptstadt von Frankreich und wie heisst sie",
        "Comment est la vie dans les villes",
        "123",
    ):
        assert not matches_filter(text, "english"), text
    assert matches_filter("Was ist die Hauptstadt", "ascii")
    for text in ("Где находится Париж?", "法国的首都是哪里", "où êtes-vous né à l'été, préféré"):
        assert not matches_filter(text, "ascii"), text
        assert matches_filter(text, "all")


def test_the_command_tells_how_far_it_is_and_what_it_wrote(model, data, tmp_path, capsys):
    assert treespec(f"regenerate --target {model} --data {data} --out {tmp_path}/out --max-new-tokens 4") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("12 conversations, ")
    assert "12/12 conversations, " in printed.err
    assert "tokens/s, 0:00:00 left" in printed.err


@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, "give one of --data and --from-template"),
        ({"from_template": 3, "endpoint": "http://localhost"}, "answers by itself: leave out --from-template"),
        ({"from_template": 3, "temperature": 0.0}, "would repeat a single one"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_before_anything_is_written(model, changes, said, tmp_path):
    with complains(said):
        regenerate_answers(regenerate_config(model, None, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


CHATML = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\\n' + m['content'] + '</s>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)
VICUNA = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' ' }}{% endfor %}{{ 'assistant:' }}"


@pytest.fixture(scope="module")
def questioned(model, tmp_path_factory):
    config = regenerate_config(
        model, None, tmp_path_factory.mktemp("own") / "whole", from_template=12, question_tokens=16
    )
    regenerate_answers(config)
    return config


PROBLEMS = {f"question: {name}" for name in ("no end", "empty", "broken characters", "repeats itself", "repeated")}
PROBLEMS.add("an answer is empty")


def test_each_question_is_answered_or_left_out_without_duplicates(questioned):
    rows = read_rows(questioned)
    left_out = read_lines(questioned, LEFT_OUT_FILE)
    assert len(rows) >= 4
    assert {*rows, *(line["row"] for line in left_out)} == {f"template-{number}" for number in range(12)}
    assert len({normalize_question(line["messages"][0]["content"]) for line in rows.values()}) == len(rows)
    assert {line["problem"] for line in left_out} <= PROBLEMS


def test_a_question_is_the_targets_own_continuation_of_its_template(questioned, model):
    spec = load(model, dtype="float32")
    prompt = spec.target.tokenizer("<s>user: ", add_special_tokens=False)["input_ids"]
    for row, line in read_rows(questioned).items():
        options = {"seed": draw_number(questioned.seed, row, "question"), "max_new_tokens": 16}
        alone = spec.generate(prompt, temperature=1.0, stop="<s>", **options)
        assert line["messages"][0]["content"] == alone.text.strip()


@forks
def test_questions_depend_on_neither_batch_nor_kill(questioned, tmp_path):
    config = replace(questioned, out=f"{tmp_path}/out", batch=3, from_template=6)
    killed_after(config, 2)
    regenerate_answers(replace(config, from_template=12))
    assert read_rows(config) == read_rows(questioned)


def test_a_target_that_repeats_itself_is_asked_a_question_once(model, tmp_path):
    config = regenerate_config(model, None, tmp_path, from_template=9, temperature=1e-4, question_tokens=12, batch=4)
    result = regenerate_answers(config)
    assert result.conversations <= 1
    assert result.left_out.total() == 9 - result.conversations


@pytest.mark.parametrize(
    "template, before, end",
    [(CHATML, "<s>user\n", "</s>"), (VICUNA, "user:", "assistant:")],
)
def test_a_users_turn_is_cut_out_of_the_template(model, template, before, end):
    spec = load(model, dtype="float32")
    spec.target.tokenizer.chat_template = template
    turn = find_user_turn(spec)
    assert turn.opening == words_tokenizer()(before, add_special_tokens=False)["input_ids"]
    assert turn.end == end


def test_a_template_that_does_not_mark_the_users_turn_is_refused(model):
    spec = load(model, dtype="float32")
    spec.target.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with complains("does not mark a user's turn"):
        find_user_turn(spec)


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
    assert find_problem(question, cut=problem == "no end", filter="english") == problem


def test_a_server_may_answer_in_the_name_of_demo(tmp_path):
    config = RegenerateConfig(target="demo", data="x.jsonl", out=str(tmp_path), endpoint="http://localhost")
    assert config.drafter == choose_default_drafter("demo")  # which --endpoint does not read
