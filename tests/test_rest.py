"""REST: its datastore finds the longest suffix, its tree holds the most frequent continuations, its file is checked."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from commands import complains, treespec
from drafters import list_token_paths
from models import plain_generate
from training import save_model, tokenizer

from treespec import load
from treespec.draft.lookup.datastore import (
    DATASTORE_FILE,
    build_datastore,
    check_datastore,
    open_datastore,
    write_datastore,
)
from treespec.draft.lookup.matches import find_longest_match
from treespec.draft.lookup.rest import Rest
from treespec.draft.lookup.suffix_cache import SuffixCaches, hash_vocabulary
from treespec.draft.registry import RestOptions
from treespec.draft.spec import DrafterSpec
from treespec.files.atomic import read_tensors, write_tensors


def random_texts(seed, count=3, length=30, vocab=3):
    return np.random.default_rng(seed).integers(vocab, size=(count, length)).tolist()


def find_by_hand(texts, context, longest):
    """The longest suffix that a token follows, and the continuations of all its occurrences."""
    for length in range(min(longest, len(context)), 0, -1):
        wanted = context[-length:]
        found = [text[end:] for text in texts for end in range(length, len(text)) if text[end - length : end] == wanted]
        if found:
            return length, found
    return 0, []


@pytest.mark.parametrize("longest", [2, 5, 16])
@pytest.mark.parametrize("seed", range(6))
def test_it_finds_the_longest_suffix(seed, longest):
    """By brute force, and as a search of all tokens finds it."""
    texts = random_texts(seed)
    texts[1] = texts[0][4:] + texts[1]  # two texts with long parts in common
    store = build_datastore(texts, 3)
    for context in [*(texts[0][:cut] for cut in (1, 3, 9, 30)), *random_texts(seed + 100, length=12)]:
        length, slots = store.find_longest_match(np.array(context), longest)
        wanted, found = find_by_hand(texts, context, longest)
        assert length == wanted
        by_hand = Counter(tuple(text[:4]) for text in found)
        continuations = store.list_continuations(slots, 4)
        assert Counter(tuple(line[: [*line, -1].index(-1)]) for line in continuations) == by_hand
        searched = find_longest_match(store.tokens, np.array(context), longest)
        assert (length, sorted(slots.tolist())) == (searched[0], searched[1].tolist())


def test_an_unknown_token_is_found_nowhere():
    assert build_datastore([[1, 2, 3]], 9).find_longest_match(np.array([1, 2, 7]), 16)[0] == 0


@pytest.mark.parametrize("seed", range(4))
def test_its_tree_holds_the_most_frequent_continuations(seed):
    texts = random_texts(seed, count=20)
    context = [*texts[0][:2], *texts[3][5:8]]
    rest = Rest(build_datastore(texts, 3), RestOptions(nodes=12, tokens=4, longest=3))
    guess = rest.draft(np.array(context))
    _, found = find_by_hand(texts, context, 3)
    weights = Counter(tuple(text[:end]) for text in found for end in range(1, 1 + min(4, len(text))))
    drafted = [path[1:] for path in list_token_paths(guess.build_token_tree(9, torch.device("cpu")))[1:]]
    assert len(set(drafted)) == 12
    assert sum(weights[path] for path in drafted) == sum(sorted(weights.values())[-12:])


def test_of_many_occurrences_it_takes_evenly_spaced_ones():
    """The first half of them, as they are sorted, follows a 0, the second half a 3."""
    store = build_datastore([[before, 1, 2, before] for before in (0, 3) for _ in range(50)], 4)
    guess = Rest(store, RestOptions(matches=10, tokens=1)).draft(np.array([1, 2]))
    assert dict(zip(guess.tokens, guess.shares, strict=True)) == {0: 0.5, 3: 0.5}


def test_a_continuation_that_no_text_holds_counts_once():
    rest = Rest(build_datastore([[1, 2, 3, 4], [1, 2, 3, 0], [1, 2, 0]], 5), RestOptions())
    guess = rest.draft(np.array([1, 2]))
    probabilities = dict(zip(zip(guess.parents, guess.tokens, strict=True), guess.probabilities[1:], strict=True))
    assert probabilities == pytest.approx({(0, 3): 2 / 4, (0, 0): 1 / 4, (1, 4): 1 / 3, (1, 0): 1 / 3})


def test_a_match_of_one_token_drafts_nothing():
    rest = Rest(build_datastore([[1, 2, 3]], 4), RestOptions())
    assert rest.draft(np.array([0, 2])).tokens == ()
    assert rest.draft(np.array([1, 2])).tokens == [3]


def test_a_continuation_ends_before_a_token_that_the_target_lacks():
    assert Rest(build_datastore([[1, 2, 3, 9, 4]], 5), RestOptions()).draft(np.array([1, 2])).tokens == [3]


def test_the_drawn_example():
    """As `treespec.draft.lookup.datastore` draws it."""
    a, b, c = range(3)
    store = build_datastore([[a, b], [c, b, a]], 3)
    assert store.tokens.tolist() == [a, b, -1, c, b, a, -1]
    assert store.slots.tolist() == [0, 3, 1, 5, 4]
    length, slots = store.find_longest_match(np.array([c, b]), 16)
    assert (length, slots.tolist()) == (2, [5])


@pytest.fixture
def file(tmp_path):
    write_datastore(build_datastore(random_texts(0), 3), tmp_path / DATASTORE_FILE, "words")
    return tmp_path / DATASTORE_FILE


def test_what_is_written_is_read(file):
    for place in (str(file), str(file.parent)):
        store = open_datastore(place, "words", 3)
        assert store.tokens.tolist() == build_datastore(random_texts(0), 3).tokens.tolist()
        assert store.slots.tolist() == build_datastore(random_texts(0), 3).slots.tolist()


def without_slots(file):
    tensors, about = read_tensors(file, "")
    write_tensors(file, {"tokens": tensors["tokens"]}, about)


def other_format(file):
    tensors, about = read_tensors(file, "")
    write_tensors(file, tensors, about | {"format": "0"})


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda file: file.unlink(), "no datastore .*: build one with treespec datastore build"),
        (lambda file: file.write_bytes(file.read_bytes()[:-2]), "is damaged: build it again"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"7"), "its checksum does not match: build it"),
        (other_format, "has format 0, this treespec reads 2: build it again"),
        (without_slots, "is no datastore: build it again"),
    ],
)
def test_what_cannot_be_used_is_one_line(file, change, complaint):
    change(file)
    with complains(complaint):
        open_datastore(str(file.parent), "words", 3)


def test_a_suffix_cache_and_another_tokenizers_datastore_are_refused(file, tmp_path):
    with complains("is of another tokenizer than the target's: build it again"):
        open_datastore(str(file), "other words", 3)
    memory = SuffixCaches(99, tmp_path / "memory", "words", 3)
    memory.add("", [1, 2])
    memory.flush()
    with complains("is no datastore"):
        open_datastore(f"{tmp_path}/memory/shared.safetensors", "words", 3)
    with complains("no datastore"):
        check_datastore(DrafterSpec.parse(f"rest:{tmp_path}/memory"), "")


def test_texts_are_counted():
    for texts in ([], [[]]):
        with complains("needs texts"):
            build_datastore(texts, 3)


def test_the_command_builds_what_is_drafted_from(tmp_path, capsys):
    """From conversations and plain text: the target's own answer is drafted, and stays the same."""
    model = str(save_model(tmp_path / "model"))
    spec = load(model, dtype="float32", verifier="topk")
    words = tokenizer()
    prompt = words.encode("the question")
    answer = plain_generate(spec.target, prompt, 24)
    (tmp_path / "said.txt").write_text("the question" + words.decode(answer))
    said = {"messages": [{"role": "user", "content": "so"}, {"role": "assistant", "content": "the answer"}]}
    (tmp_path / "said.jsonl").write_text(json.dumps(said) + "\nno json\n")
    out = f"{tmp_path}/store"
    line = f"datastore build --target {model} --data {tmp_path}/said.txt --data {tmp_path}/said.jsonl --out {out}"
    assert treespec(line) == 0
    said = capsys.readouterr()
    printed = said.out + said.err
    assert "1 conversations used, 1 left out" in printed
    assert "of 2 texts, after 0.0 s" in printed
    assert f"--drafter rest:{out}" in printed
    store = open_datastore(out, hash_vocabulary(words), len(words))
    assert words.encode((tmp_path / "said.txt").read_text()) == store.tokens[: store.tokens.tolist().index(-1)].tolist()
    drafted = load(model, drafter=f"rest:{out}", dtype="float32", verifier="topk").generate(prompt, max_new_tokens=24)
    assert drafted.token_ids == answer
