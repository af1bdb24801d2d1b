"""Every form of prompt is answered as what it is, and all else is refused by name."""

import math
from decimal import Decimal

import numpy as np
import pytest
import torch
import transformers as hf
from commands import complains, tiny_spec
from models import target

from treespec.api.spec import Spec

TEXT = "the user asks"
MESSAGES = [{"role": "system", "content": "answers"}, {"role": "user", "content": TEXT}]
NEW = 4


@pytest.fixture(scope="module")
def spec():
    return tiny_spec().baseline()


@pytest.fixture(scope="module")
def words(spec):
    return spec.target.tokenizer


def answer(spec, ids):
    return spec.generate(ids, max_new_tokens=NEW).token_ids


def answers(spec, prompts):
    return [output.token_ids for output in spec.generate(prompts, max_new_tokens=NEW)]


IDS = [5, 9, 7]
OTHER = [5, 9, 4]
SINGLE = {"list": IDS, "tuple": (5, 9, 7), "tensor": torch.tensor(IDS), "array": np.array(IDS, dtype=np.int32)}
ROW = {"tensor": torch.tensor([IDS]), "array": np.array([IDS])}
SEVERAL = {
    "tensor": torch.tensor([IDS, OTHER]),
    "array": np.array([IDS, OTHER]),
    "lists": [IDS, OTHER],
    "tensors": [torch.tensor(IDS), torch.tensor(OTHER)],
}


@pytest.mark.parametrize("given", SINGLE.values(), ids=SINGLE)
def test_token_ids_are_one_prompt_however_they_are_held(spec, given):
    assert spec.encode(given) == IDS
    assert answer(spec, given) == answer(spec, IDS)
    assert answers(spec, [given]) == [answer(spec, IDS)]


def test_text_and_messages_are_one_prompt_each(spec, words):
    assert spec.encode(TEXT) == words.encode(TEXT)
    assert spec.encode(MESSAGES) == words.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert spec.encode(tuple(MESSAGES)) == spec.encode(MESSAGES)
    marked = [*MESSAGES[:-1], MESSAGES[-1] | {"interrupted": True}]
    parts = [one | {"content": [{"type": "text", "text": one["content"]}]} for one in MESSAGES]
    assert spec.encode(marked) == spec.encode(parts) == spec.encode(MESSAGES)


@pytest.mark.parametrize("given", SEVERAL.values(), ids=SEVERAL)
def test_rows_are_prompts_each_as_alone(spec, given):
    wanted = [answer(spec, IDS), answer(spec, OTHER)]
    assert answers(spec, given) == wanted
    for one_at_a_time in (spec.stream, spec.encode):
        with complains("2 prompts where one prompt is taken"):
            one_at_a_time(given)


def test_a_list_of_conversations_is_several_prompts_one_of_messages_one(spec):
    wanted = [answer(spec, MESSAGES), answer(spec, MESSAGES[1:])]
    assert answers(spec, [MESSAGES, MESSAGES[1:]]) == wanted
    assert answers(spec, [MESSAGES]) == wanted[:1]


@pytest.mark.parametrize("row", ROW.values(), ids=ROW)
def test_one_row_is_one_prompt_and_from_generate_a_list(spec, row):
    assert spec.encode(row) == IDS
    stream = spec.stream(row, max_new_tokens=NEW)
    list(stream)
    assert answers(spec, row) == [stream.output.token_ids]


def test_nothing_is_no_prompt_and_no_prompts_have_no_answers(spec):
    for nothing in ([], (), "", torch.empty(0, dtype=torch.int64), np.empty(0, dtype=np.int64)):
        with complains("the prompt is empty"):
            spec.generate(nothing)
    for none in (torch.empty(0, 4, dtype=torch.int64), np.empty((0, 4), dtype=np.int64)):
        assert spec.generate(none) == []


REFUSED = [
    (None, "a prompt is text, a list of messages or a list of token ids, not None"),
    (5, "not 5"),
    (hf.BatchEncoding({"input_ids": IDS}), "has input_ids of one row"),
    (MESSAGES[0], "a list of messages .* not {'role': "),
    (b"the user", "not b'the user'"),
    ((token for token in IDS), "not <generator"),
    ([5.0, 9.0], "token 1 of the prompt is 5.0"),
    ([True, False], "token 1 of the prompt is True"),
    ([5, None], "token 2 of the prompt is None"),
    (torch.tensor([5.0]), "token 1 of the prompt is 5.0"),
    (np.array([5, None]), "token 2 of the prompt is None"),
    (np.ma.array(IDS, mask=[0, 0, 1]), "token 3 of the prompt is None"),
    (torch.tensor(5), "not 5"),
    ([torch.tensor(5), torch.tensor(9)], "prompt 1 of 2: .* not 5"),
    ([5, -1], "token 2 of the prompt is -1"),
    (torch.tensor([5, 1 << 40]), "is outside the vocabulary"),
    ([None, "the user"], "prompt 1 of 2: .* not None"),
    (["the user", MESSAGES[0]], "prompt 2 of 2: .* a list of messages"),
    ([MESSAGES[0], "the user"], "message 2 is 'the user': give role and content"),
    ([{"content": "a"}], "message 1 is .*: give role and content"),
    ([{"role": "user"}], "message 1: its content must be a string or a list of text parts"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "the target has no folder"),
    ("the \ud800 user", "character 5 is half of a surrogate pair"),
    ([{"role": "user", "content": "\udc00"}], "message 1 is no valid text: character"),
]


@pytest.mark.parametrize("given, complaint", REFUSED)
def test_all_else_is_refused_by_name_in_one_line(spec, given, complaint):
    with complains(complaint):
        spec.generate(given, max_new_tokens=NEW)


@pytest.mark.parametrize("given", [TEXT, MESSAGES, [TEXT]])
def test_without_a_tokenizer_only_token_ids_are_taken(given):
    wordless = Spec(target("llama"), None)
    with complains("no tokenizer"):
        wordless.generate(given)
    with complains("no tokenizer"):
        wordless.generate(IDS, stop="x")
    assert 0 < len(answer(wordless, IDS)) <= NEW


NOT = {  # an option, and what it may not be
    "temperature": (None, "0.7", True, math.inf, 10**400, Decimal("0.5"), torch.tensor(0.5)),
    "top_k": (1.5, True, None),
    "top_p": (None, math.nan),
    "min_p": ("0", False),
    "max_new_tokens": (2.5, math.nan, None, True, 0),
    "stop": (None, b"x", {"x"}),
    "seed": (-1, 1 << 64, 1.0, True),
    "batch": (0, 1.0, True),
}
WRONG = [(name, value, f"{name} is ") for name, values in NOT.items() for value in values]
WRONG += [
    ("stop", ["x", 5], r"stop is \['x', 5\]"),
    ("stop", ["x", ""], "stop takes 16 strings at most, each of 1 to 1000"),
]
WRONG += [("temprature", 1.0, r"no option temprature: did you mean temperature\?")]


@pytest.mark.parametrize("name, value, complaint", WRONG)
def test_options_are_refused_by_name(spec, name, value, complaint):
    for given in (IDS, [IDS, IDS]):
        with complains(complaint):
            spec.generate(given, **{name: value})
    if name != "batch":
        with complains(complaint):
            spec.stream(IDS, **{name: value})


def test_numbers_of_numpy_are_numbers(spec):
    wanted = spec.generate(TEXT, temperature=0.5, top_k=7, seed=3, max_new_tokens=NEW).token_ids
    options = {"temperature": np.float32(0.5), "top_k": np.int64(7), "seed": np.uint8(3), "stop": ("\0",)}
    assert spec.generate(TEXT, max_new_tokens=np.int16(NEW), **options).token_ids == wanted


def test_seeds_are_one_for_each_prompt(spec):
    def texts(seed):
        return [o.token_ids for o in spec.generate([TEXT] * 3, temperature=1.0, seed=seed, max_new_tokens=NEW)]

    assert texts(7) == texts([7, 8, 9]) == texts((7, 8, 9)) == texts(range(7, 10))
    assert texts((1 << 64) - 3)
    for seed, complaint in (
        ([7, 8], "2 seeds for 3 prompts"),
        ([7, 8, 9, 10], "4 seeds for 3 prompts"),
        ([7, 8, -9], "prompt 3 of 3: seed is -9"),
        ((1 << 64) - 2, "3 answers take it and the next ones: it must be at most"),
        ("789", "seed is '789'"),
    ):
        with complains(complaint):
            texts(seed)
    with complains("2 seeds for 1 prompts"):
        spec.generate(TEXT, seed=[7, 8])
