"""Retrieval: what a suffix array finds is what a search of all places finds, and a datastore is whole or not there."""

import json
from collections import Counter

import numpy as np
import pytest
from commands import treespec
from models import plain_generate, save_model, tokenizer
from refusals import complains

from treespec import load
from treespec.draft.model_free import datastore
from treespec.draft.model_free.datastore import (
    DATASTORE,
    ORDER,
    Datastore,
    build,
    encoded,
    open_datastore,
    suffix_array,
)
from treespec.files.atomic import read_tensors, write_tensors

END = -1
LINE = "the user asks and the assistant answers the question\n"


def random_tokens(seed, length=200):
    """Of four kinds, with an end every now and then."""
    tokens = np.random.default_rng(seed).integers(4, size=length).astype(np.int32)
    tokens[29::30] = END
    return tokens


def store_of(tokens):
    return Datastore(tokens, suffix_array(tokens, ORDER), 10)


def rewritten(file, lacks=None, **about):
    """Write a datastore's file again with other metadata or without an array."""
    tensors, before = read_tensors(file, "")
    write_tensors(file, {name: value.clone() for name, value in tensors.items() if name != lacks}, before | about)


def brute(tokens, pattern):
    """Where a pattern stands."""
    return [i for i in range(len(tokens)) if tokens[i : i + len(pattern)].tolist() == pattern]


@pytest.mark.parametrize("order", [1, 2, 5, 16])
@pytest.mark.parametrize("length", [1, 2, 3, 200])
def test_places_are_sorted_by_what_begins_there(order, length):
    tokens = random_tokens(order, length)
    places = suffix_array(tokens, order).tolist()
    assert sorted(places) == list(range(length))
    beginnings = [tokens[place : place + order].tolist() for place in places]
    assert beginnings == sorted(beginnings)


@pytest.mark.parametrize("seed", range(5))
def test_a_search_finds_every_place(seed):
    tokens = random_tokens(seed)
    store = store_of(tokens)
    for length in (1, 2, 4, 16):
        for pattern in (tokens[77 : 77 + length].tolist(), random_tokens(seed + 9, length).tolist(), [9] * length):
            ranks = store.places_of(np.array(pattern))
            assert sorted(store.suffixes[list(ranks)].tolist()) == brute(tokens, pattern)


@pytest.mark.parametrize("seed", range(6))
def test_they_are_what_follows_in_the_text_up_to_its_end(seed):
    tokens, text = random_tokens(seed), random_tokens(seed + 50, 9)
    text[text == END] = 0
    known = next(n for n in range(9, 1, -1) if brute(tokens, text[-n:].tolist()))
    wanted = Counter()
    for place in brute(tokens, text[-known:].tolist()):
        following = tokens[place + known : place + known + 5].tolist()
        following = following[: following.index(END)] if END in following else following
        wanted[tuple(following + [-1] * (5 - len(following)))] += 1
    found = store_of(tokens).continuations(text.astype(np.int64), 5000, 5)
    assert Counter(map(tuple, found.tolist())) == wanted


def test_of_too_many_each_kind_keeps_its_share():
    tokens = np.array([0, 1, 2, 0, 1, 3, 0, 1, 3] * 100 + [END], dtype=np.int32)
    found = store_of(tokens).continuations(np.array([0, 1]), 30, 1)
    assert Counter(found[:, 0].tolist()) == {2: 10, 3: 20}


@pytest.fixture
def folder(tmp_path):
    words = tokenizer()
    assert build([words.encode(LINE)] * 2, words, tmp_path / "store") == 2 * len(words.encode(LINE)) + 2
    return tmp_path / "store"


def test_what_is_written_is_what_is_read(folder):
    words = tokenizer()
    store = open_datastore(folder, words, 400)
    text = words.encode(LINE)
    assert store.tokens.tolist() == [*text, END] * 2
    assert store.suffixes.tolist() == suffix_array(store.tokens, ORDER).tolist()


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda file: file.unlink(), "no datastore at"),
        (lambda file: rewritten(file, format="0"), "has format 0, this treespec reads 2: build it again"),
        (lambda file: rewritten(file, tokenizer="other"), "of another tokenizer than the target's"),
        (lambda file: rewritten(file, lacks="suffixes"), "is damaged"),
        (lambda file: rewritten(file, lacks="tokens"), "is damaged"),
    ],
)
def test_what_cannot_be_used_is_one_line(folder, change, complaint):
    change(folder / DATASTORE)
    with complains(complaint):
        open_datastore(folder, tokenizer(), 400)


def test_what_a_killed_build_has_left_is_no_datastore_and_built_over(folder):
    (folder / f".{DATASTORE}.99999999.tmp").write_text("half")
    (folder / DATASTORE).unlink()
    with complains("no datastore"):
        open_datastore(folder, tokenizer(), 400)
    build([[1, 2, 3]], tokenizer(), folder)
    assert open_datastore(folder, tokenizer(), 400).tokens[:3].tolist() == [1, 2, 3]
    assert {path.name for path in folder.iterdir()} == {DATASTORE}


def test_an_existing_folder_and_an_empty_text_are_refused(folder, tmp_path):
    with complains("exists: delete it"):
        build([[1, 2, 3]], tokenizer(), folder)
    with complains("holds no text"):
        build([[]], tokenizer(), tmp_path / "other")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.txt").write_text("not a datastore's")
    for name in ("mine", "mine/mine.txt"):
        with complains("exists: delete it"):
            build([[1, 2, 3]], tokenizer(), tmp_path / name)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["mine.txt"]


def test_plain_text_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(datastore, "BLOCK", 100)
    monkeypatch.setattr(datastore, "BLOCKS", 3)
    (tmp_path / "text.txt").write_text(LINE * 20 + "the end")
    [tokens] = encoded(tmp_path / "text.txt", tokenizer())
    assert tokenizer().decode(tokens) == LINE * 20 + "the end"


def test_the_command_line_builds_a_datastore_and_drafts_from_it(tmp_path, monkeypatch, capsys):
    """From the target's own answer: most of it is drafted, and it stays the same."""
    model = str(save_model(tmp_path / "model"))
    spec = load(model, dtype="float32")
    question = [{"role": "user", "content": "the question"}]
    prompt = spec.encode(question)
    words = spec.target.tokenizer
    answer = plain_generate(spec.target, prompt, 24)
    said = {"messages": [{"role": "user", "content": "so"}, {"role": "assistant", "content": words.decode(answer)}]}
    (tmp_path / "said.jsonl").write_text(json.dumps(said) + "\nno json\n")
    (tmp_path / "said.txt").write_text(words.decode(answer))
    for name in ("said.jsonl", "said.txt"):
        out = f"{tmp_path}/store-{name}"
        line = f"datastore build --target {model} --data {tmp_path}/{name} --out {out}"
        assert treespec(line) == 0
        printed = capsys.readouterr().out
        assert f"Draft from them with --drafter rest:{out}" in printed.replace("\n", "")
        assert ("said.jsonl:2: not valid JSON" in printed) == (name == "said.jsonl")
        assert treespec(line) == 2
        assert "exists: delete it" in capsys.readouterr().err
        drafted = load(model, drafter=f"rest:{out},nodes=16", dtype="float32").generate(prompt, max_new_tokens=24)
        assert drafted.token_ids == answer
    options = f"--drafter rest:{out} --prompt 'the question' --dtype float32 --max-new-tokens 8"
    assert treespec(f"generate --target {model} {options}") == 0
    wanted = spec.generate(question, max_new_tokens=8).text
    assert capsys.readouterr().out == wanted + "\n"
